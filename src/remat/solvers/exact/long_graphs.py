"""Long graphs: thousands of layers, or a recurrence over thousands of steps, in time that grows as they do.

In: an incumbent. Out: a bound and schedules offered to it. `priced_cut` says what to keep at the tightest op, and how
fast any schedule can be. Taken by its word alone it would give up whole stretches of forward, which then are in memory
at once when they are computed again. So checkpoints come in between: what crosses forward at places where little does,
spaced so that what is computed again between two of them fits into what is free by then. That is a reserve at first,
and grows as backward uses up what was kept behind. The rest of the room is priced again with these checkpoints given.
"""

from __future__ import annotations

import numpy as np

from remat.core.schedule import plain_schedule
from remat.core.search.deadline import check_time
from remat.core.simulate import simulate
from remat.solvers.exact.bounds import safe
from remat.solvers.exact.priced_cut import PricedChoice, PricedCut, is_available
from remat.solvers.schedule.editable import flatten
from remat.solvers.schedule.keep import first_backward, staged_schedule
from remat.solvers.search.certain import crossing_bytes, crossing_values
from remat.solvers.search.incumbent import ScheduleIncumbent

RESERVES = (0.02, 0.05, 0.01, 0.1, 0.2, 0.35)
"""Of the room at the cut, what is left free for what is computed again first, in the order in which they are tried."""
SHORTEST = 0.6
"""Of the longest stretch that fits, how short one may be, so that it begins where little crosses."""
FREED = 0.9
"""Of what was kept behind a stretch, what counts as free when the stretch is computed again."""
ROUNDS = 3
"""How often checkpoints are spaced anew for what is then computed again."""
HALVINGS = 4


def try_prices(incumbent: ScheduleIncumbent, share: float = 1.0) -> None:
    """See the module's docstring; takes at most a share of the time, and needs scipy."""
    if not is_available():
        return
    search = _Search(incumbent, incumbent.countdown.elapsed_s() + share * incumbent.limits.time_limit_s)
    if not search.start():
        return
    for part in RESERVES:
        search.try_reserve(int(part * search.room))
    search.fill()


class _Search:
    def __init__(self, incumbent: ScheduleIncumbent, until_s: float) -> None:
        problem, self._until_s = incumbent.problem, until_s
        self.incumbent, self.flat = incumbent, flatten(problem)
        plain = simulate(problem, plain_schedule(problem.graph))
        cut = self.cut = plain.peak_step
        self.room = incumbent.budget - self.flat.resident - self.flat.workspace[cut] - self.flat.output_bytes[cut]
        self.turn = min(first_backward(problem), cut)
        self.last_readers = {value: number for number in range(self.turn) for value in self.flat.inputs[number]}
        """For each value, the last op of forward that reads it."""
        self.crossing = crossing_bytes(self.flat, self.turn, self.last_readers)
        self.fastest: tuple[float, PricedCut, int] | None = None
        """Time, checkpoints and room of the fastest schedule that fits."""

    def _stop(self) -> bool:
        """Is the time up? The share of it is for making something better: a first schedule may take all of it."""
        check_time()
        is_late = self.incumbent.countdown.elapsed_s() > self._until_s
        return self.incumbent.stop() or (is_late and self.incumbent.best is not None)

    def start(self) -> bool:
        """Prove the bound; says whether there can be schedules."""
        self.bare = PricedCut(self.flat, self.cut)
        if self.bare.given_bytes > self.room:
            return False
        bound, choice = self.bare.best(self.room)
        self.incumbent.raise_bound(safe(bound), "priced cut")
        self._offer(self.bare, self.room, choice)
        return True

    def try_reserve(self, reserve: int) -> None:
        """Leave `reserve` bytes free at the cut; stretches that prove too long for it get shorter."""
        priced, allowed = self.bare, reserve
        for _ in range(ROUNDS):
            if self._stop() or priced.given_bytes > self.room - reserve:
                return
            _, choice = priced.best(self.room - reserve)
            over = self._offer(priced, self.room - reserve, choice)
            if priced is not self.bare:
                if over <= 0:
                    return
                allowed = max(allowed - over, allowed // 2)
            priced = PricedCut(self.flat, self.cut, self._checkpoints(priced.kept(choice), allowed))

    def fill(self) -> None:
        """Give the fastest schedule's checkpoints as much of what is left as fits."""
        if self.fastest is None:
            return
        _, priced, enough = self.fastest
        high = self.room
        for _ in range(HALVINGS):
            if self._stop():
                return
            middle = (enough + high) // 2
            _, choice = priced.best(middle)
            enough, high = (middle, high) if self._offer(priced, middle, choice) <= 0 else (enough, middle)

    def _offer(self, priced: PricedCut, room: int, choice: PricedChoice) -> int:
        """Build the schedule of a choice; by how many bytes it is over the budget."""
        schedule = staged_schedule(self.flat, [priced.kept(choice)], [self.cut])
        timeline = simulate(self.incumbent.problem, schedule)
        over = timeline.peak_bytes - self.incumbent.budget
        self.incumbent.lowest_peak = min(self.incumbent.lowest_peak, timeline.peak_bytes)
        if over <= 0:
            self.incumbent.offer_schedule(schedule, "priced cut", timeline)
            if self.fastest is None or timeline.time_ns < self.fastest[0]:
                self.fastest = timeline.time_ns, priced, room
        return over

    def _checkpoints(self, kept: frozenset[int], reserve: int) -> set[int]:
        """What crosses forward where one stretch ends and the next begins."""
        return crossing_values(self.flat, sorted(self._places(kept, reserve)), self.last_readers)

    def _places(self, chosen: frozenset[int], reserve: int) -> list[int]:
        """From the end of forward on, stretches as long as what is free by then allows."""
        flat, turn = self.flat, self.turn
        again, kept = np.zeros(turn + 1, dtype=np.int64), np.zeros(turn + 1, dtype=np.int64)
        for value in self.bare.read_later:
            number = flat.producer[value]
            if number < turn:
                (kept if value in chosen else again)[number + 1] += flat.size[value]
        again, kept = again.cumsum(), kept.cumsum()
        end = turn
        places: list[int] = []
        while True:
            free = reserve + FREED * (kept[turn] - kept[end])
            longest = int(np.searchsorted(again, again[end] - free))
            if longest <= 0:
                return places
            shortest = max(longest + 1, int(np.searchsorted(again, again[end] - SHORTEST * free)))
            place = longest + int(self.crossing[longest : min(shortest, end)].argmin()) if longest < end else end - 1
            places.append(place)
            end = place
