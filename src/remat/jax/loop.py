"""Solve, compile, look, correct: until the compiled step fits.

In: a step and how much temporary memory it may have. Out: a `Found`: the fastest schedule whose compiled program fits.
The model knows what is alive; XLA adds what its order and its placement of buffers cost, which changes little from one
schedule to the next. So what the first compilation was off by is taken from the budget of the second, and so on.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from remat.core.budget import format_bytes
from remat.core.memory_rules import CPU
from remat.core.problem import LARGEST_BYTES, Problem
from remat.core.results.plan import PlannedScan
from remat.core.schedule import Schedule, plain_schedule
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.errors import InfeasibleBudget
from remat.jax.costs.compiled import Pull, StepMemory, compile_step, default_device, memory_of, platform
from remat.jax.costs.op_costs import measured_costs, resident_bytes
from remat.jax.costs.timing import Stopwatch, stopwatch
from remat.jax.graph.capture import JoinedStep, capture, capture_whole
from remat.jax.graph.contract import FusedGraph, contract
from remat.jax.run.cuts import segment_numbers
from remat.jax.run.hold import SLOW_INSIDE, Means, first_token, holder, means_for
from remat.jax.run.replay import Replay, cut_segments
from remat.jax.scans.rewrite import ScanPlans
from remat.solvers.base import judge

_log = logging.getLogger(__name__)

MOST_COMPILATIONS = 3
CLOSE = 0.95
"""Of the budget: a step that uses as much, or that recomputes nothing, is not compiled again."""
SCAN_ROUNDS = 5
"""How often the bytes for scans are set anew before each compilation."""
TOLERANCE = 1e-6
HOPE = 1.5
"""Of the budget: the leanest schedule is compiled where the model says that it needs no more than this."""
HELD_WEIGHT, LAST_WEIGHT = 0.5, 1.25
"""Of what the model was off by: where the order will be held it may be less, and the last compilation has to fit."""
MARGIN = 0.015
"""Of the budget, taken away with each correction."""


@dataclass(frozen=True, slots=True)
class FlatStep:
    """A function of flat arguments, and what is asked of it."""

    function: Callable[..., list[Any]]
    """As it is."""
    planned: Callable[..., list[Any]]
    """With its scans run as `scans` say; the same where it has none."""
    avals: tuple[Any, ...]
    wanted: tuple[bool, ...] | None
    """Of each argument, whether its gradient is computed; None for a function that computes its own."""
    followed_results: int | None = None
    options: Mapping[str, Any] | None = None
    scans: ScanPlans | None = None
    placed: tuple[Any, ...] | None = None
    """The arguments with their shardings, where they lie on several devices."""
    share: float = 1.0
    """What one device holds of what is computed."""
    resident_bytes: int | None = None
    """What one device holds of arguments and results; None where that is all of them."""

    @property
    def compiled_for(self) -> tuple[Any, ...]:
        return self.avals if self.placed is None else self.placed


@dataclass(frozen=True, slots=True)
class Asked:
    """How to solve."""

    solver: str = "auto"
    time_limit_s: float = 4.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outline:
    """What a step computes, and what of it XLA fuses."""

    captured: JoinedStep
    contracted: FusedGraph


@dataclass(frozen=True, slots=True)
class Model:
    """A step as a problem."""

    captured: JoinedStep
    contracted: FusedGraph
    problem: Problem
    resident: tuple[tuple[str, int], ...]
    means: Means

    @property
    def resident_total(self) -> int:
        return sum(size for _, size in self.resident)

    def cotangents(self) -> list[Any]:
        program = self.captured.program
        return [program.avals[number] for number in program.cotangents]

    def replay(self, schedule: Schedule) -> Replay:
        alone: set[int] = {self.contracted.boundary}
        if self.means is Means.CONDITIONALS:
            alone.update(step for step, op in enumerate(self.contracted.graph.ops) if op.target in SLOW_INSIDE)
        numbers = segment_numbers(self.problem, schedule, alone)
        return cut_segments(self.contracted, schedule, numbers)


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule that was compiled, and what it needs."""

    model: Model
    solution: Solution
    replay: Replay
    means: Means
    memory: StepMemory
    compilations: int
    scans: tuple[PlannedScan, ...] = ()

    @property
    def time_ns(self) -> float:
        return self.solution.time_ns


def outline_of(step: FlatStep) -> Outline:
    """Capture and contract a step."""
    if step.wanted is None:
        captured = capture_whole(step.function, step.avals)
    else:
        captured = capture(step.planned, step.avals, step.wanted, step.followed_results)
    return Outline(captured, contract(captured.program))


def model_of(step: FlatStep, watch: Stopwatch | None = None, outline: Outline | None = None) -> Model:
    """Capture, contract and cost a step; nothing is compiled but single equations."""
    outline = outline or outline_of(step)
    captured, contracted = outline.captured, outline.contracted
    costs = measured_costs(contracted, watch or stopwatch(default_device()))
    resident = resident_bytes(captured.program, captured.wanted)
    if step.share < 1:
        costs = replace(
            costs, **{name: _shared(getattr(costs, name), step.share) for name in ("size_bytes", "workspace_bytes")}
        )
    if step.resident_bytes is not None:
        resident = (("arguments and results on each device", step.resident_bytes),)
    problem = Problem(contracted.graph, costs, 0, sum(size for _, size in resident))
    return Model(captured, contracted, problem, resident, means_for(platform()))


def _shared(sizes: Sequence[int], share: float) -> tuple[int, ...]:
    """A device's part of values that are computed from a batch that is split."""
    return tuple(math.ceil(size * share) for size in sizes)


def plain_memory(step: FlatStep, model: Model) -> StepMemory:
    """What the step needs as jax runs it by itself."""
    return memory_of(compile_step(plain_pull(step, model), step.compiled_for, model.cotangents(), step.options))


def plain_pull(step: FlatStep, model: Model) -> Pull:
    """The step as jax runs it by itself."""
    wanted = step.wanted or ()

    def pull(leaves: Sequence[Any], given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        if step.wanted is None:
            return step.function(*leaves), []

        def of(*moving: Any) -> tuple[list[Any], list[Any]]:
            rest = iter(moving)
            found = step.function(*(next(rest) if want else leaf for leaf, want in zip(leaves, wanted, strict=True)))
            return [item for item, follow in zip(found, model.captured.followed, strict=True) if follow], found

        moving = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        _, back, results = jax.vjp(of, *moving, has_aux=True)
        return results, list(back(list(given)))

    return pull


def replayed(replay: Replay, means: Means) -> Pull:
    """Forward and backward under a schedule."""
    hold = holder(means)

    def pull(leaves: Sequence[Any], given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        token = first_token(means, leaves)
        results, saved = replay.forward(leaves, hold, token)
        return results, replay.backward(leaves, saved, list(given), hold, token)

    return pull


def means_of(model: Model, schedule: Schedule) -> Means:
    """What holds the order of a schedule: a step as it is needs nothing."""
    return Means.NOTHING if schedule == plain_schedule(model.contracted.graph) else model.means


@dataclass(slots=True)
class _Aim:
    """What to ask of the model so that the compiled step comes out right."""

    allowed: int
    target: int
    fitted: int | None = None
    """The largest target whose step fitted."""
    missed: int | None = None
    """The smallest whose step did not."""

    def correct(self, used: int, predicted: int, weight: float = 1.0) -> None:
        """What the last compilation was off by, times `weight`, is taken from the budget of the next."""
        margin = MARGIN
        if used > self.allowed:
            # Every target from there on gets the same schedule.
            self.missed = min(self.target, predicted)
        else:
            self.fitted, margin = self.target, MARGIN / 3
        self.target = self.allowed - int(weight * (used - predicted)) - int(margin * self.allowed)
        if self.missed is not None:
            self.target = min(self.target, self.missed - 1)
        if self.fitted is not None and self.missed is not None and self.fitted < self.missed:
            quarter = (self.missed - self.fitted) // 4
            self.target = min(max(self.target, self.fitted + quarter), self.missed - quarter)


def search(step: FlatStep, model: Model, allowed_bytes: int, asked: Asked) -> Found:
    """The best of at most three compiled schedules with no more than `allowed_bytes` of temporary memory.

    What is refused must not be refused for what XLA happened to do: where none fits, the leanest are compiled too.
    """
    tries = _Tries(step, allowed_bytes)
    aim, always_held = _Aim(allowed_bytes, allowed_bytes), False
    for number in range(1, MOST_COMPILATIONS + 1):
        try:
            model, solution = propose(step, model, aim.target, asked)
        except InfeasibleBudget as error:
            if number == 1 and error.min_budget - model.resident_total > HOPE * allowed_bytes:
                raise
            break
        # Loops that make something again are planned to the last byte; beside them XLA's own order is off by more.
        held = always_held or _scan_extra_ns(step) > 0
        if tries.runs_the_same(model, solution, held):
            break
        found = tries.compile(model, solution, held)
        used, predicted = found.memory.temporary_bytes, solution.peak_bytes - model.resident_total
        if used <= allowed_bytes and _is_enough(step, solution, used, allowed_bytes):
            break
        if used > allowed_bytes and _can_be_held(step, found):
            # The order that the model knows of may be enough; what XLA's own order needs says nothing about that.
            always_held, model = True, _held(step, model)
            aim.correct(used, predicted, HELD_WEIGHT)
            aim.missed = None
        else:
            is_last = tries.best is None and number == MOST_COMPILATIONS - 1
            aim.correct(used, predicted, LAST_WEIGHT if is_last else 1.0)
            if is_last and step.scans is not None:
                step.scans.in_one = True
    candidates = _leanest(step, model, asked)
    while tries.best is None and (lean := next(candidates, None)) is not None:
        if not tries.runs_the_same(*lean):
            tries.compile(*lean)
    if tries.best is None:
        raise _too_small(model, allowed_bytes, tries.least_bytes)
    return replace(tries.best, compilations=tries.count)


@dataclass(slots=True)
class _Tries:
    """What was compiled so far."""

    step: FlatStep
    allowed_bytes: int
    best: Found | None = None
    """The fastest that fits."""
    tried: list[Found] = field(default_factory=list)
    least_bytes: int = LARGEST_BYTES
    bound_ns: float | None = None
    """What is proven for all of the budget, and so for every part of it."""
    count: int = 0

    def compile(self, model: Model, solution: Solution, held: bool) -> Found:
        if self.bound_ns is None:
            self.bound_ns = solution.bound_ns - _scan_extra_ns(self.step)
        self.count += 1
        found = _compiled(self.step, model, _judged(solution, self.bound_ns), self.count, held)
        used = found.memory.temporary_bytes
        self.tried.append(found)
        self.least_bytes = min(used, self.least_bytes)
        if used <= self.allowed_bytes and (self.best is None or found.time_ns <= self.best.time_ns):
            self.best = found
        return found

    def runs_the_same(self, model: Model, solution: Solution, held: bool) -> bool:
        """Whether compiling again would show nothing new."""
        if solution.schedule is None:
            return False
        scans = self.step.scans.planned() if self.step.scans is not None else ()
        known = (solution.schedule, scans, model.means if held else means_of(model, solution.schedule))
        return any(known == (found.solution.schedule, found.scans, found.means) for found in self.tried)


def _leanest(step: FlatStep, model: Model, asked: Asked) -> Iterator[tuple[Model, Solution, bool]]:
    """What may need least, the likeliest first, and whether its order is held."""
    if step.scans is not None:
        step.scans.allowed_bytes = 0.0
        # In XLA's own order, as `jax.checkpoint` runs the body of a scan, and in ours.
        for means in (Means.NOTHING, model.means):
            step.scans.means = step.scans.heavy = means
            model = model_of(step)
            problem = model.problem.with_budget(_plain_peak(model))
            yield model, judge(problem, plain_schedule(problem.graph), "none"), means is not Means.NOTHING
    try:
        solution = solve_within(model, 0, asked)
    except InfeasibleBudget as error:
        solution = solve_within(model, error.min_budget - model.resident_total, asked)
    # One that makes nothing again is the step as it is, which fits what it needs.
    yield model, solution, False


def _can_be_held(step: FlatStep, found: Found) -> bool:
    """Whether XLA was left to choose the order, of the step or inside its scans."""
    return (step.scans is not None and step.scans.is_free) or found.means is Means.NOTHING


def _held(step: FlatStep, model: Model) -> Model:
    """The step with the order inside its scans held too."""
    if step.scans is None or step.scans.means is model.means:
        return model
    step.scans.means = model.means
    return model_of(step)


def propose(step: FlatStep, model: Model, target_bytes: int, asked: Asked) -> tuple[Model, Solution]:
    """A schedule that the model says to fit; scans get what the rest of the step leaves."""
    if step.scans is not None:
        model = _with_scans(step, step.scans, model, target_bytes)
    return model, solve_within(model, target_bytes, asked)


def _with_scans(step: FlatStep, scans: ScanPlans, model: Model, target_bytes: int) -> Model:
    """The step with as much saved in its scans as fits; with the least where nothing does."""
    best: tuple[int, float, Model] | None = None
    leanest: tuple[int, float, Model] | None = None
    for _ in range(SCAN_ROUNDS):
        spare, saved = target_bytes - _plain_peak(model) + model.resident_total, scans.saved_bytes
        here = (saved, scans.allowed_bytes, model)
        if spare >= 0 and (best is None or saved > best[0]):
            best = here
        if leanest is None or saved < leanest[0]:
            leanest = here
        scans.allowed_bytes = saved + spare
        if scans.saved_bytes == saved:
            break
        model = model_of(step)
    chosen = best or leanest
    assert chosen is not None, "there is at least one round"
    _, scans.allowed_bytes, model = chosen
    return model


def _scan_extra_ns(step: FlatStep) -> float:
    """What iterations make again: nothing is proven about how much of that is needed."""
    return 0.0 if step.scans is None else step.scans.extra_ns


def _plain_peak(model: Model) -> int:
    return simulate(model.problem, plain_schedule(model.contracted.graph)).peak_bytes


def _judged(solution: Solution, bound_ns: float) -> Solution:
    """The solution with what is proven for the whole budget."""
    bound = min(bound_ns, solution.time_ns)
    is_best = solution.time_ns - bound <= TOLERANCE * solution.time_ns
    return replace(solution, bound_ns=bound, status=Status.OPTIMAL if is_best else Status.FEASIBLE)


def _is_enough(step: FlatStep, solution: Solution, used: int, allowed_bytes: int) -> bool:
    """Whether there is nothing to win from one more compilation of a step that fits."""
    assert solution.schedule is not None
    if used >= CLOSE * allowed_bytes:
        return True
    if step.scans is not None and step.scans.grows_with(allowed_bytes - used):
        return False
    return not solution.schedule.recomputed()


def solve_within(model: Model, temporary_bytes: int, asked: Asked) -> Solution:
    """The fastest schedule within so much temporary memory."""
    from remat.within import fit_within

    problem = model.problem.with_budget(model.resident_total + max(0, temporary_bytes))
    return fit_within(problem, asked.solver, rules=CPU, time_limit_s=asked.time_limit_s, seed=asked.seed).solution


def _compiled(step: FlatStep, model: Model, solution: Solution, number: int, held: bool) -> Found:
    assert solution.schedule is not None
    replay = model.replay(solution.schedule)
    means = model.means if held else means_of(model, solution.schedule)
    began = time.perf_counter()
    compiled = compile_step(replayed(replay, means), step.compiled_for, model.cotangents(), step.options)
    memory = memory_of(compiled)
    _log.info(
        "Compilation %d: predicted %s, needs %s of temporary memory (%.1f s).",
        number,
        format_bytes(solution.peak_bytes - model.resident_total),
        format_bytes(memory.temporary_bytes),
        time.perf_counter() - began,
    )
    scans = step.scans.planned() if step.scans is not None else ()
    return Found(model, solution, replay, means, memory, number, scans)


def _too_small(model: Model, allowed_bytes: int, least_bytes: int) -> InfeasibleBudget:
    asked, least = (format_bytes(model.resident_total + size) for size in (allowed_bytes, least_bytes))
    return InfeasibleBudget(
        f"Budget {asked} is below the smallest known peak of {least} of the compiled step; "
        "raise the budget or lower the batch.",
        model.resident_total + least_bytes,
    )
