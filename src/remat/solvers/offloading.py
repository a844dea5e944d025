"""Any solver, for problems whose values may spend a while on the host: keep, compute again or copy, decided together.

In: a problem with copies (`core/copies.py`), and a solver that knows nothing of them. Out: a solution that uses them.
The solver is asked for schedules without copies: of this budget, of larger ones, and as if what the cut program has on
the host (`exact/copy_cuts.py`) took no memory. Further ones are what that program says with room set aside where its
schedules overflow (`exact/copy_reserves.py`). Each is made to fit by copies alone (`schedule/to_host.py`) and by copies
that nobody waits for and recomputation (`search/around_trips.py`), and the fastest stays; small problems are settled
by a shortest path.

**Never slower.** The answer is not slower than the one that the solver finds without copies in the same time. It is
first asked for that in a share of the time. If it ends by itself, or has proven that nothing without copies is faster
than what was found with them, that settles it; else it is asked once more with all of the time, so that the whole may
take twice as long.

**The bound.** That of the cut program, or this one where it is higher. Take any schedule with copies that is as fast as
the best one known, of time T. Let values stay in memory where it has them on the host: what is left is a schedule
without copies of at most its time, and of at most its memory and what is on the host at once. All that is on the host
at some moment t was copied out before and is copied back after it, so it is at most `min(out * t, back * (T - t))`
bytes, and at most `T * out * back / (out + back)` whenever that is, where `out` and `back` are the most bytes that any
copy moves in a nanosecond. So no schedule with copies within a budget B is faster than the bound, without copies, for B
and that much.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from math import exp
from typing import final

from remat.core.copies import computing_steps, has_copies, movable_of, without_copies
from remat.core.problem import LARGEST_BYTES, Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.core.search.deadline import OutOfTime
from remat.core.search.limits import Countdown, Limits
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.core.validate import naive_host_bytes, validate
from remat.solvers.backends.linear_highs import is_available
from remat.solvers.base import TOLERANCE, MovesValues, Progress, Solver
from remat.solvers.exact.bounds import MAX_COLUMNS
from remat.solvers.exact.copy_cuts import AwayAnswer, bound_with_copies
from remat.solvers.exact.copy_refinement import refine
from remat.solvers.exact.copy_reserves import Reserves
from remat.solvers.exact.shortest_with_copies import fastest_with_copies
from remat.solvers.schedule.editable import EditableSchedule, extra_keys
from remat.solvers.schedule.keep import drop_all_but
from remat.solvers.schedule.to_host import Trip, fit_by_copies, trips_without_waiting, without_bytes
from remat.solvers.search.around_trips import TravelPlan, around_trips
from remat.solvers.search.floor import lowest_schedule
from remat.solvers.wrapping import WrappingSolver

SHARES = (1.0, 0.5, 0.75, 0.25, 0.88, 0.62, 0.38, 0.12)
"""Of what can be on the host at once: by so much budgets are larger for which the solvers are asked, in this order."""
ON_THE_WAY = (0, 1)
"""Of the largest value on the host: so many are taken to be in memory at once on their way out or back."""
FIRST_SHARE, CUT_SHARE, BOUND_SHARE, AWAY_SHARE, ROOMY_SHARE, AROUND_SHARE = 0.2, 0.15, 0.08, 0.05, 0.05, 0.02
"""Of the time: for a schedule without copies, for the bound of the cut program and the other one, for each attempt with
copies of either kind, and for each look around what it found.
"""
RESERVES_SHARE, MORE_CUTS_SHARE, TURN_SHARE, LOOK_SHARE = 0.2, 0.3, 0.05, 0.007
"""Of the time: for the program with room set aside, for the one with more cuts, for room set aside and looks around the
best schedule in each turn after them, and for each look.
"""
RESERVES_PATIENCE = 100
"""Rounds with room set aside without a better schedule after which no more is tried."""
WINDOWS = (0, 0, 2, 5, 10, 20)
"""Stages in a row whose recomputation a look around the best schedule takes away first."""
NOISE = (None, 0.0, 0.3, 1.0, 2.0)
"""By how much chance changes what it is worth to have a value away instead of computing it again; None where those
leave first that are not read for longest.
"""
HOPEFUL = 1.05
"""Of the best time: what takes longer is not searched around."""
PROMISING, SEARCHED_SHARE = 1.01, 0.4
"""The same for looks around the best schedule, and how many of them search at all."""
WORSE, BACK_SHARE = (0.0, 0.0, 0.003, 0.01, 0.02), 0.05
"""By how much worse schedules may be that looks go on from, and how often they return to the best."""
PATIENCE = 200
"""Looks around the best schedule without a better one after which no more is tried."""
ROUNDS = 2
"""How often copies are chosen for a schedule, and the schedule is changed for them."""
LEAST_S = 0.05
BY_ITSELF_SHARE = 0.25
"""A solver that took less of its time than this was ended by none of the limits into which solvers share it out."""
INTERRUPTED_S = 1e8
"""A clock so far beyond the end was moved there by someone who wants no more."""
WITH_COPIES = "Values are copied to the host."
SETTLED_OPS = 24
"""Problems of so many ops, those that move values among them, are settled before anything else is tried."""
HALVINGS = 12
"""How often the interval is halved in which the smallest budget lies that copies can meet."""


@final
@dataclass(frozen=True, slots=True)
class Offloading(WrappingSolver):
    """A solver whose schedules may have values on the host."""

    own: MovesValues | None = None
    """Where the solver chooses copies by itself: then nothing else chooses any."""

    def solve(self, problem: Problem, limits: Limits, progress: Callable[[Progress], None] | None = None) -> Solution:
        if not has_copies(problem.graph):
            return self.inner.solve(problem, limits, progress)
        search = _Search(problem, self.inner, limits, progress, is_own=self.own is not None)
        search.without_copies()
        with suppress(OutOfTime):
            if self.own is not None:
                search.choose_by(self.own)
            elif len(problem.graph.ops) <= SETTLED_OPS:
                search.settle()
            if self.own is None and not search.is_done():
                search.with_copies()
                search.settle()
        search.without_copies_again()
        return search.answer()


class _Search:
    def __init__(
        self,
        problem: Problem,
        inner: Solver,
        limits: Limits,
        progress: Callable[[Progress], None] | None,
        *,
        is_own: bool,
    ) -> None:
        self.is_own = is_own
        self.problem, self.plain = problem, without_copies(problem)
        self.inner, self.progress = inner, progress
        self.limits, self.countdown = limits, Countdown(limits)
        self.best: Solution | None = None
        self.refused: Solution | None = None
        self.bound_ns = problem.base_time_ns
        self.leanest: list[Schedule] = []
        self.cut: AwayAnswer | None = None
        """What the program of a single cut says."""
        self.reserves: Reserves | None = None
        self.rng = random.Random(limits.seed)
        self.alone_ns = 0.0
        """What schedules without copies take at least that the inner solver would find in the whole time."""

    def is_done(self) -> bool:
        return self.best is not None and self.best.time_ns <= self.bound_ns * (1 + self.limits.gap)

    def without_copies(self) -> None:
        first = self._within(FIRST_SHARE)
        found = self.inner.solve(self.plain, first, self.progress)
        self._note(found)
        self.best = found if found.schedule is not None else None
        # A search that ended by itself would have done so in more time, too.
        is_whole = self.countdown.elapsed_s() < BY_ITSELF_SHARE * first.time_limit_s
        self.alone_ns = float("inf") if is_whole else found.bound_ns

    def without_copies_again(self) -> None:
        """Ask for a schedule without copies in the whole time, where one might be faster than what there is."""
        best_ns = self.best.time_ns if self.best is not None else float("inf")
        if best_ns <= self.alone_ns or self.countdown.is_over_by(INTERRUPTED_S):
            return
        found = self.inner.solve(self.plain, self.limits, self.progress)
        self._note(found)
        if found.schedule is not None and found.time_ns < best_ns:
            self.best = found

    def _note(self, found: Solution) -> None:
        if found.schedule is None and self.refused is None:
            self.refused = found

    def with_copies(self) -> None:
        most = self._most_away(self._known_time())
        # The bound for more memory needs a time that a schedule is known to reach.
        is_known = self.best is not None
        self.leanest = [plain_schedule(self.plain.graph)]
        self._fit(self.leanest[0])
        if self.best is None:
            self.leanest.append(lowest_schedule(self.plain, stop=self._stop))
            self._fit(self.leanest[1])
        had_any = self._try_away()
        for share in SHARES[:1] if had_any else SHARES:
            if self._is_over():
                return
            self._try(self.problem.budget_bytes + int(share * most), is_bound=share == 1.0 and is_known)
        while not self._is_over() and self._turn():
            pass

    def choose_by(self, own: MovesValues) -> None:
        limits = self.limits.within(self.countdown.left_s())
        for steps in own.schedules_with_copies(self.problem, limits, self._raise_bound):
            if simulate(self.problem, steps).peak_bytes <= self.problem.budget_bytes:
                self._offer(steps)
            if self._stop():
                break

    def _raise_bound(self, bound_ns: float) -> None:
        self.bound_ns = max(self.bound_ns, bound_ns)

    def _refine(self) -> None:
        """Raise the bound by more cuts, and fit what they say."""
        if self.cut is None or self._is_over():
            return
        for found in refine(self.problem, self.cut, self._within(MORE_CUTS_SHARE), self._stop):
            self._raise_bound(self.problem.base_time_ns + found.extra_time)
            if self._is_over():
                return
            if found.computing is not None:
                self._go_around(found.computing, found.away, ROUNDS)

    def _turn(self) -> bool:
        """Once more with room set aside, and around the best schedule; says whether it is worth another turn."""
        before = self._known_time()
        has_more = self._try_reserves(TURN_SHARE)
        self._look_around(TURN_SHARE)
        return has_more or self._known_time() < before

    def _look_around(self, share: float) -> None:
        """Choose copies for good schedules anew, and change these for them, for a share of the time."""
        rng, idle, prices = self.rng, 0, self._prices()
        slice_ = Countdown(self._within(share))
        current = self.best.schedule if self.best is not None else None
        while self.best is not None and current is not None and idle < PATIENCE and not self._is_over():
            if slice_.left_s() <= 0:
                break
            before = self.best.time_ns
            computing = self._thinned(computing_steps(self.problem.graph, current), rng)
            trips = trips_without_waiting(self.problem, computing, *self._chances(prices, rng))
            # Most are looked at in passing: to search around each takes far longer.
            promising = PROMISING if rng.random() < SEARCHED_SHARE else 1.0 - TOLERANCE
            made = self._take_trips(computing, trips, rng.randrange(1 << 30), LOOK_SHARE, promising * before)
            if made is not None and made.time_ns <= before * (1 + rng.choice(WORSE)):
                current = made.steps
            elif rng.random() < BACK_SHARE:
                current = self.best.schedule
            idle = 0 if self.best.time_ns < before else idle + 1

    @staticmethod
    def _chances(prices: dict[int, float], rng: random.Random) -> tuple[list[int], dict[int, float] | None]:
        """Which values may leave, and what each is worth: some are kept back, so that others have their turn."""
        stay, noise = rng.choice((0.0, 0.02, 0.1, 0.3)), rng.choice(NOISE)
        values = [value for value in prices if rng.random() >= stay]
        if noise is None:
            return values, None
        return values, {value: price * exp(rng.gauss(0.0, noise)) for value, price in prices.items()}

    def _prices(self) -> dict[int, float]:
        """For each value that may leave, the time that it takes to compute it again, by its bytes."""
        producers, costs = self.plain.graph.producers(), self.plain.costs
        values = [item.value for item in movable_of(self.problem)]
        return {value: costs.time_ns[producers[value]] / max(1, costs.size_bytes[value]) for value in values}

    def _thinned(self, computing: Schedule, rng: random.Random) -> Schedule:
        """The same without what runs again in a few stages: more copies then have a place."""
        count, window = len(self.plain.graph.ops), rng.choice(WINDOWS)
        keys = extra_keys(computing, count)
        if not keys or not window:
            return computing
        first = rng.choice(sorted({key // count for key in keys}))
        left = [key for key in keys if not first <= key // count < first + window]
        return EditableSchedule(self.plain, left).schedule()

    def _is_over(self) -> bool:
        return self.best is not None and (self.is_done() or self.countdown.left_s() <= 0)

    def _try_away(self) -> bool:
        """Ask for schedules in which what the cut program has on the host takes no memory; says whether it had any."""
        if not is_available() or 3 * len(self.plain.graph.ops) > MAX_COLUMNS or self._is_over():
            return False
        found = bound_with_copies(self.problem, self._within(CUT_SHARE), self._stop)
        self.cut = found if found.cut >= 0 else None
        if found.extra_time < float("inf"):
            self._raise_bound(self.problem.base_time_ns + found.extra_time)
        if found.away:
            editable = EditableSchedule(self.plain)
            drop_all_but(editable, (found.kept | found.away,), (found.cut,))
            self._fit(editable.schedule(), found.away)
            self.reserves = Reserves(self.problem, found.cut, self.limits.seed)
            self._try_reserves(RESERVES_SHARE)
        self._refine()
        largest = max((self.problem.costs.size_bytes[value] for value in found.away), default=0)
        lighter = without_bytes(self.plain, found.away)
        for count in ON_THE_WAY if found.away else ():
            if self._is_over():
                break
            tighter = lighter.with_budget(self.problem.budget_bytes - count * largest)
            self._solve_and_fit(tighter, AWAY_SHARE, found.away)
        return bool(found.away)

    def _try_reserves(self, share: float) -> bool:
        """Fit what the cut program says with room set aside where its schedules overflow; False when that is idle."""
        slice_ = Countdown(self._within(share))
        while self.reserves is not None and slice_.left_s() > 0 and not self._is_over():
            found = self.reserves.propose(self.limits.within(max(LEAST_S, slice_.left_s())), self._stop)
            if found is None or self.reserves.idle >= RESERVES_PATIENCE:
                return False
            # Only what is better as it is will be searched around: another round takes far less time.
            promising_ns = (1.0 - TOLERANCE) * self._known_time()
            made = self._take_trips(found.computing, found.trips, self.reserves.idle, LOOK_SHARE, promising_ns)
            if made is not None:
                self.reserves.learn(made.time_ns)
        return self.reserves is not None

    def _within(self, share: float) -> Limits:
        return self.limits.within(max(LEAST_S, min(share * self.limits.time_limit_s, self.countdown.left_s())))

    def _known_time(self) -> float:
        """Of a schedule that fits, or of one that is hardly worth a try."""
        return self.best.time_ns if self.best is not None else 2 * self.problem.base_time_ns

    def _most_away(self, time_ns: float) -> int:
        """What can be on the host at once in a step of that time."""
        sizes = self.problem.costs.size_bytes
        all_bytes, host = sum(sizes), self.problem.host_budget_bytes
        rates = [(item.out_ns, item.back_ns, sizes[item.value]) for item in movable_of(self.problem)]
        if any(min(out, back) * LARGEST_BYTES <= size for out, back, size in rates):
            return min(all_bytes, host)
        out, back = max(size / out for out, _, size in rates), max(size / back for _, back, size in rates)
        at_once = min(float(LARGEST_BYTES), time_ns * out * back / (out + back)) if out + back else 0
        return min(host, int(at_once) + 1, all_bytes)

    def _try(self, budget_bytes: int, *, is_bound: bool) -> None:
        """Ask for a schedule of that budget, and let copies bring it within the one there is."""
        larger = self.plain.with_budget(min(LARGEST_BYTES, budget_bytes))
        bound_ns = self._solve_and_fit(larger, BOUND_SHARE if is_bound else ROOMY_SHARE)
        if is_bound:
            self._raise_bound(bound_ns)

    def _solve_and_fit(self, changed: Problem, share: float, away: Collection[int] | None = None) -> float:
        """Ask for a schedule of another problem; gives its bound, where it has a schedule."""
        found = self.inner.solve(changed, self._within(share), None)
        if found.schedule is None:
            self._note(found)
            return 0.0
        self._fit(found.schedule, away)
        return found.bound_ns

    def _fit(self, schedule: Schedule, away: Collection[int] | None = None) -> None:
        """Let copies bring a schedule within the budget, and let ops run again where they do not do it alone."""
        steps = fit_by_copies(self.problem, schedule)
        if steps is not None:
            self._offer(steps)
        for values in (away, None) if away is not None else (None,):
            computing: Schedule | None = schedule
            for round in range(ROUNDS):
                if computing is None or self._is_over():
                    break
                computing = self._go_around(computing, values, round)

    def _go_around(self, computing: Schedule, values: Collection[int] | None, seed: int) -> Schedule | None:
        trips = trips_without_waiting(self.problem, computing, values)
        promising_ns = HOPEFUL * self.best.time_ns if self.best is not None else float("inf")
        made = self._take_trips(computing, trips, seed, AROUND_SHARE, promising_ns)
        return made.computing if made is not None else None

    def _take_trips(
        self, computing: Schedule, trips: list[Trip], seed: int, share: float, promising_ns: float = float("inf")
    ) -> TravelPlan | None:
        slice_ = Countdown(self._within(share))
        made = around_trips(self.problem, computing, trips, lambda: slice_.left_s() <= 0, seed, promising_ns)
        if made is not None:
            self._offer(made.steps)
        return made

    def _stop(self) -> bool:
        return self.countdown.left_s() <= 0

    def _offer(self, steps: Schedule) -> None:
        time_ns = simulate(self.problem, steps).time_ns
        if self.best is not None and time_ns >= self.best.time_ns:
            return
        if naive_host_bytes(self.problem, steps) > self.problem.host_budget_bytes:
            return
        peak = validate(self.problem, steps, keep_order=False)
        name, reason = self.inner.name, self._reason()
        self.best = Solution(Status.FEASIBLE, steps, time_ns, peak, self.bound_ns, peak, name, reason)
        if self.progress is not None:
            elapsed = self.countdown.elapsed_s()
            self.progress(Progress(elapsed, time_ns, self.bound_ns, f"{self.inner.name}, with copies"))

    def _reason(self) -> str:
        is_its_own = self.inner.name == "auto" or self.is_own
        return WITH_COPIES if is_its_own else f"{WITH_COPIES} `{self.inner.name}` knows no copies: others chose them."

    def settle(self) -> None:
        """Small problems are settled for good."""
        if self.is_done():
            return
        known = self.best.time_ns if self.best is not None else float("inf")
        with suppress(OutOfTime):
            found = fastest_with_copies(self.problem, known)
            if found.schedule is not None:
                self._offer(found.schedule)
            if found.complete and self.best is not None:
                self.bound_ns = self.best.time_ns

    def answer(self) -> Solution:
        """The best, with the bound that holds for schedules with copies; else the smallest budget that is known."""
        if self.best is None:
            assert self.refused is not None, "what was not found was refused"
            least = min(self.refused.min_budget_bytes, self._least_budget(self.refused.min_budget_bytes))
            return replace(self.refused, min_budget_bytes=least, peak_bytes=least)
        bound = min(self.bound_ns, self.best.time_ns)
        is_best = self.best.time_ns - bound <= TOLERANCE * self.best.time_ns
        return replace(self.best, bound_ns=bound, status=Status.OPTIMAL if is_best else Status.FEASIBLE)

    def _least_budget(self, enough: int) -> int:
        """The smallest budget within which copies bring the step, as it is or at its leanest, above that asked for."""
        low = self.problem.budget_bytes
        for _ in range(HALVINGS):
            middle = (low + enough) // 2
            within = self.problem.with_budget(middle)
            fits = any(fit_by_copies(within, schedule) is not None for schedule in self.leanest)
            low, enough = (low, middle) if fits else (middle, enough)
        return enough
