"""Which values of the forward to save for a compiled backward.

In: a `Joint`, what kernels cost, how many bytes the step may add. Out: a `Choice`. The solvers schedule the contracted
graph; what their schedule carries from forward to backward is saved, the rest is made again. They do not know that
kernels write into what they read last, nor all that compiled code puts into memory, so what they are given is corrected
until the prediction, which knows, comes close to the budget: more memory where it is below, a workspace for the ops
where it is above.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from remat.core.budget import format_bytes
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.errors import InfeasibleBudget
from remat.inductor.model.contract import Contracted, contract
from remat.inductor.model.fill import fill
from remat.inductor.model.joint import Joint
from remat.inductor.model.policies import block_inputs, matmuls
from remat.inductor.model.predict import Moment, Prediction, predict
from remat.inductor.model.program import MeasuredRates
from remat.inductor.model.small import with_small
from remat.inductor.model.split import pruned
from remat.inductor.model.unroll import Unrolled, copied_rates, unroll
from remat.solvers import solve
from remat.solvers.search.floor import squeeze

ROUNDS = 8
SHARE = 0.1
"""Of the time limit: what one of the rounds may take."""
GAP = 2e-3
"""Of the step's time: the costs of kernels are not known better than that."""
WIDER = (1.1, 1.25, 1.5, 2.0)
NARROWER = (0.97, 0.9, 0.8)
CLOSE_SHARE = 0.005
"""Of the budget: nearer than this nothing more is tried."""
SMALL_SHARE = 2**-12
"""Of the budget: a value that takes no more is not worth making again."""
SMALL_COST = 1e-3
"""Of the step's time: small kernels that prices are not exact about."""


@dataclass(frozen=True, slots=True)
class Choice:
    saved: frozenset[int]
    """Nodes whose results are saved."""
    prediction: Prediction
    solution: Solution
    """Of the contracted problem."""
    is_default: bool = False
    """Whether this is what torch.compile saves by itself."""
    unrolled: Unrolled | None = None
    """Where backward makes values again more than once."""


def choose(
    joint: Joint,
    rates: MeasuredRates,
    budget_bytes: int,
    *,
    solver: str = "auto",
    time_limit_s: float = 10.0,
    may_copy: bool = True,
    saved_bytes: int | None = None,
) -> Choice:
    """The fastest choice found whose predicted peak is within `budget_bytes`: the solvers', or what people do by hand.

    Without `may_copy` backward makes no value again more than once. At most `saved_bytes` go from forward to backward,
    where that is said.
    """
    search = _Search(joint, rates, budget_bytes, solver, SHARE * time_limit_s, may_copy, saved_bytes)
    for _ in range(ROUNDS):
        if search.is_over():
            break
        search.attempt()

    def fits(choice: Choice) -> bool:
        most = saved_bytes if saved_bytes is not None else choice.prediction.saved_bytes
        return choice.prediction.peak_bytes <= budget_bytes and choice.prediction.saved_bytes <= most

    known = [*([search.best] if search.best is not None else []), *_by_hand(joint, rates, budget_bytes)]
    fitting = [choice for choice in known if fits(choice)]
    if not fitting:
        found = _squeezed(joint, rates, [int(factor * budget_bytes) for factor in NARROWER], may_copy)
        fitting = [choice for choice in found if fits(choice)]
    if fitting:
        best = search.proven(min(fitting, key=lambda choice: choice.prediction.time_ns))
        rounded = _with_small(joint, rates, best, budget_bytes)
        return rounded if fits(rounded) else best
    peak = min(choice.prediction.peak_bytes for choice in found)
    raise InfeasibleBudget(
        f"The compiled step needs {format_bytes(peak)} beyond what is there when it begins, and the budget leaves "
        f"{format_bytes(max(budget_bytes, 0))}; give more.",
        min_budget=peak,
    )


def _with_small(joint: Joint, rates: MeasuredRates, choice: Choice, budget_bytes: int) -> Choice:
    """The same, saving small values where what it saves is not worth more; what was proven stays."""
    if choice.unrolled is not None:
        return choice
    saved = with_small(joint, choice.saved, int(SMALL_SHARE * budget_bytes))
    if saved == choice.saved:
        return choice
    prediction = predict(joint, saved, rates)
    is_as_good = prediction.time_ns <= (1 + SMALL_COST) * choice.prediction.time_ns
    fits = prediction.peak_bytes <= budget_bytes
    return replace(choice, saved=saved, prediction=prediction) if is_as_good and fits else choice


def _by_hand(joint: Joint, rates: MeasuredRates, budget_bytes: int) -> Iterator[Choice]:
    """What people save by hand, and the first of these that fits with what else there is memory for."""
    is_filled = False
    for saved in (matmuls(joint), block_inputs(joint)):
        choice = given(joint, rates, saved | joint.kept)
        yield choice
        if choice.prediction.peak_bytes <= budget_bytes and not is_filled:
            is_filled = True
            yield given(joint, rates, fill(joint, rates, choice.saved, budget_bytes))


def leanest(joint: Joint, rates: MeasuredRates, *, may_copy: bool = True) -> Choice:
    """The choice with the smallest peak that is known."""
    by_hand = given(joint, rates, block_inputs(joint) | joint.kept)
    return min([*_squeezed(joint, rates, (), may_copy), by_hand], key=lambda choice: choice.prediction.peak_bytes)


def _squeezed(joint: Joint, rates: MeasuredRates, targets: Iterable[int], may_copy: bool) -> list[Choice]:
    """By no solver: the smallest schedule that is known, and such as should just be within `targets`.

    The smallest schedules run ops many times, which compiled code cannot always follow, so somewhat larger ones are
    looked at too.
    """
    contracted = contract(joint, rates)
    problem = Problem(contracted.graph, contracted.costs, budget_bytes=0)
    smallest = squeeze(problem)
    wider = [int(smallest.peak * factor) for factor in WIDER]
    tapes = [smallest, *(squeeze(problem, target) for target in (*wider, *targets) if target > smallest.peak)]
    return [
        _choice(joint, rates, contracted, _as_solution(problem, tape.schedule(), "floor"), may_copy) for tape in tapes
    ]


def given(joint: Joint, rates: MeasuredRates, saved: frozenset[int]) -> Choice:
    """What is known of a choice that was made elsewhere; what backward never reads is not saved."""
    saved = pruned(joint, saved)
    contracted = contract(joint, rates)
    problem = Problem(contracted.graph, contracted.costs, budget_bytes=0)
    solution = _as_solution(problem, contracted.schedule(saved), "given")
    return Choice(saved, predict(joint, saved, rates), solution)


def priced(joint: Joint, rates: MeasuredRates, choice: Choice) -> Choice:
    """The same choice at other prices; what it could save at most is told as if nothing had to run again."""
    contracted = contract(joint, rates)
    problem = Problem(contracted.graph, contracted.costs, budget_bytes=0)
    assert choice.solution.schedule is not None, "a choice was made of a schedule"
    solution = _as_solution(problem, choice.solution.schedule, choice.solution.solver)
    whole, all_rates = joint, rates
    if choice.unrolled is not None:
        whole, all_rates = choice.unrolled.joint, copied_rates(rates, choice.unrolled, len(joint.nodes))
    return replace(choice, prediction=predict(whole, choice.saved, all_rates), solution=solution)


def scheduled(joint: Joint, rates: MeasuredRates, solution: Solution) -> Choice:
    """What is known of a choice that a schedule of the contracted graph leads to."""
    return _choice(joint, rates, contract(joint, rates), solution, may_copy=True)


class _Search:
    """Looks for what the solver is to be given so that compiled code just stays within the budget."""

    def __init__(
        self,
        joint: Joint,
        rates: MeasuredRates,
        budget_bytes: int,
        solver: str,
        time_limit_s: float,
        may_copy: bool,
        saved_bytes: int | None = None,
    ) -> None:
        self.may_copy, self.saved_bytes = may_copy, saved_bytes
        self.joint, self.rates, self.budget_bytes = joint, rates, budget_bytes
        self.solver, self.time_limit_s = solver, time_limit_s
        self.contracted = contract(joint, rates)
        self._op_of = {node: op for op, node in enumerate(self.contracted.op_of)}
        self.best: Choice | None = None
        self._bounds: list[tuple[Problem, float]] = []
        """What was proven of schedules that fit, with first computations in the order of the graph."""
        self._memory = budget_bytes
        self._enough = 0
        """The most memory with which the prediction was within the budget, or nothing fitted."""
        self._too_much: int | None = None
        self._beyond: dict[int, int] = {}
        """For ops of the contracted graph, how much more compiled code needs there than the solver thinks."""
        self._is_close = False

    def is_over(self) -> bool:
        is_squeezed = self._too_much is not None and self._too_much - self._enough <= CLOSE_SHARE * self.budget_bytes
        return self._is_close or is_squeezed or self.budget_bytes <= 0

    def attempt(self) -> None:
        found = self._solve()
        spare = self.budget_bytes - found.prediction.peak_bytes if found is not None else 0
        if found is not None and spare < 0 and self._learn(found):
            # That is another problem: what was too much may be right for it.
            self._too_much = None
            return
        if found is None or spare >= 0:
            self._enough = max(self._enough, self._memory)
        else:
            self._too_much = min(self._memory, self._too_much or self._memory)
        if found is not None and spare >= 0:
            self._is_close = spare <= CLOSE_SHARE * self.budget_bytes or _keeps_all(found)
            if self.best is None or found.prediction.time_ns < self.best.prediction.time_ns:
                self.best = found
        # A little less than what would just fit, so that the next attempt is not over by a hair.
        self._memory += (
            spare - int(CLOSE_SHARE * self.budget_bytes / 2) if found is not None else self.budget_bytes // 10
        )
        if self._too_much is not None and not self._enough < self._memory < self._too_much:
            self._memory = (self._enough + self._too_much) // 2

    def _solve(self) -> Choice | None:
        problem = self._problem()
        try:
            solution = solve(problem, self.solver, time_limit_s=self.time_limit_s, gap=GAP)
        except InfeasibleBudget:
            return None
        if solution.schedule is None:
            return None
        if _is_in_order(solution.schedule):
            self._bounds.append((problem, solution.bound_ns))
        return _choice(self.joint, self.rates, self.contracted, solution, self.may_copy)

    def proven(self, choice: Choice) -> Choice:
        """The same with the best bound that holds for it: no solver has made what is done by hand, but what was proven
        of all schedules that fit is true of its own.
        """
        solution, schedule = choice.solution, choice.solution.schedule
        if schedule is None or not _is_in_order(schedule):
            return choice
        bounds = (
            bound for problem, bound in self._bounds if simulate(problem, schedule).peak_bytes <= problem.budget_bytes
        )
        bound_ns = min(solution.time_ns, max([solution.bound_ns, *bounds]))
        return replace(choice, solution=replace(solution, bound_ns=bound_ns))

    def _problem(self) -> Problem:
        """With workspaces where the prediction has been above the budget."""
        spaces = list(self.contracted.costs.workspace_bytes)
        for op, beyond in self._beyond.items():
            spaces[op] += max(0, beyond + self._memory - self.budget_bytes)
        if self.saved_bytes is not None and self.contracted.boundary >= 0:
            # While the first op of backward runs, what was saved is all that is there.
            spaces[self.contracted.boundary] += max(0, self._memory - self.saved_bytes)
        costs = replace(self.contracted.costs, workspace_bytes=tuple(spaces))
        return Problem(self.contracted.graph, costs, self._memory)

    def _learn(self, found: Choice) -> bool:
        """Note where compiled code needs more than the solver thinks, and more than there is; whether that is new."""
        thought, is_new = self._thought(found.solution.schedule), False
        for moment in found.prediction.moments:
            if moment.live_bytes <= self.budget_bytes:
                continue
            for op in self._ops_at(found, moment):
                key = op, moment.in_backward
                beyond = moment.live_bytes - thought.get(key, moment.live_bytes)
                if key in thought and beyond > self._beyond.get(op, self.budget_bytes - self._memory):
                    self._beyond[op], is_new = beyond, True
        return is_new

    def _thought(self, schedule: Schedule | None) -> dict[tuple[int, bool], int]:
        """What the solver thinks is live while each op runs, in forward and in backward."""
        assert schedule is not None, "a choice was made of a schedule"
        problem = Problem(self.contracted.graph, self.contracted.costs, self._memory)
        found: dict[tuple[int, bool], int] = {}
        seen: set[int] = set()
        for op, live in zip(schedule.steps, simulate(problem, schedule).live_bytes, strict=True):
            key = op, op >= self.contracted.boundary or op in seen
            found[key] = max(live, found.get(key, 0))
            seen.add(op)
        return found

    def _ops_at(self, found: Choice, moment: Moment) -> list[int]:
        """The ops of the contracted graph that a moment stands for: its own, and the one that it runs for."""
        count = len(self.joint.nodes)
        copies = found.unrolled.copies if found.unrolled is not None else ()
        nodes = [copies[node - count].original if node >= count else node for node in (moment.node, moment.at)]
        return [self._op_of[node] for node in dict.fromkeys(nodes) if node in self._op_of]


def _is_in_order(schedule: Schedule) -> bool:
    firsts = list(dict.fromkeys(schedule.steps))
    return firsts == sorted(firsts)


def _keeps_all(choice: Choice) -> bool:
    schedule = choice.solution.schedule
    return schedule is not None and not schedule.recomputed()


def _choice(joint: Joint, rates: MeasuredRates, contracted: Contracted, solution: Solution, may_copy: bool) -> Choice:
    assert solution.schedule is not None
    unrolled = unroll(joint, contracted, solution.schedule)
    plain = Choice(unrolled.saved, predict(joint, unrolled.saved, rates), solution)
    if not unrolled.copies or not may_copy:
        return plain
    prediction = predict(unrolled.joint, unrolled.saved, copied_rates(rates, unrolled, len(joint.nodes)))
    choice = Choice(unrolled.saved, prediction, solution, unrolled=unrolled)
    return choice if prediction.peak_bytes < plain.prediction.peak_bytes else plain


def _as_solution(problem: Problem, schedule: Schedule, solver: str) -> Solution:
    found = simulate(problem, schedule)
    return Solution(
        Status.FEASIBLE, schedule, found.time_ns, found.peak_bytes, problem.base_time_ns, found.peak_bytes, solver
    )
