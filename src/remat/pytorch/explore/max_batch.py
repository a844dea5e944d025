"""`max_batch_size`: the largest batch, or sequence length, that trains within a budget.

In: a model with its batch, or a function from a size to one. Out: a `MaxBatch`. Three ways of training are compared:
plain, per-block checkpointing and Remat. Sizes are predicted from laws first (see `scaling`); around what was predicted
the step is captured and its ops are measured, which runs no step; and one real step under the plan confirms our size.
Where it does not hold, a second one runs one size lower.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from remat.core.budget import Budget, BudgetUnit, format_bytes, parse_budget
from remat.core.eager import as_eager
from remat.core.files.plan_file import graph_hash
from remat.core.problem import Problem, floor_bytes
from remat.core.results.max_batch import Limit, MaxBatch, check_axis
from remat.core.results.plan import Plan
from remat.core.schedule import Schedule, plain_schedule
from remat.core.search.largest import largest
from remat.core.simulate import simulate
from remat.errors import InfeasibleBudget, RematError
from remat.pipeline import with_host
from remat.pytorch.device import device_name, rules_of, total_bytes
from remat.pytorch.explore.module_blocks import repeated_blocks
from remat.pytorch.explore.resize import resized, size_along
from remat.pytorch.explore.scaling import DEGREES, SMALLEST, Build, Optimizers, Scaling, Sized, scale
from remat.pytorch.host.shared import checked_place, place_for_plans
from remat.pytorch.measure.measure_step import measure_once
from remat.pytorch.reach import reachable_from
from remat.pytorch.run.optimize import listed, plan_ahead, plan_of, session_of
from remat.pytorch.run.settings import Settings
from remat.solvers.schedule.module_blocks import block_schedule, blocks_peak_bytes
from remat.solvers.schedule.order import lower_order, reordered, translated
from remat.solvers.schedule.to_host import fit_by_copies
from remat.solvers.search.floor import lowest_schedule
from remat.within import solve_within
from remat.zoo.example import Example, as_example

MOST_REAL_STEPS = 2
FIRST_SIZE = 8
"""In steps of the grid, where nothing says what size is usual."""
NEARLY_RATIO = 1.1
"""A smallest peak within this factor of the budget is worth a longer look."""
GENERATOR_BYTES = 5056
"""A state of the CPU's generator, of which `torch.utils.checkpoint` keeps one for each block."""


@dataclass(frozen=True, slots=True)
class BatchSearch:
    """What to find, and how."""

    budget: Budget
    axis: str = "batch"
    grid: int = 1
    time_limit_s: float = 10.0
    seed: int = 0
    optimizers: Optimizers = lambda model: ()
    offload: str = ""
    tell: Callable[[str], None] = lambda message: None


def max_batch_size(
    build_or_model: Any,
    *args: Any,
    budget: str | int | float | Budget,
    grid: int = 1,
    axis: str = "batch",
    start: int | None = None,
    optimizer: Any = None,
    offload: str | None = None,
    time_limit: float = 10.0,
    seed: int = 0,
    **kwargs: Any,
) -> MaxBatch:
    """The largest multiple of `grid` that fits `budget` along `axis`, "batch" or "length".

    Give a model with its arguments, whose tensors are repeated or cut along dimension 0 (1 for lengths), or a function
    from a size to (model, args), (model, args, kwargs) or an `Example`. `start` is a usual size, which "2x" is of.
    `optimizer`: one, several, or a function from a model to them. `offload` is where values may spend a while, as in
    `optimize`.
    """
    check_axis(axis, grid)
    place = checked_place(offload)
    search = BatchSearch(parse_budget(budget), axis, grid, time_limit, seed, _optimizers(optimizer), place)
    if isinstance(build_or_model, nn.Module) or args or kwargs:
        example = Example(build_or_model, args, kwargs)
        usual = start or size_along(example, axis)
        return find_max_batch(lambda size: resized(example, axis, size), usual, search, _name(build_or_model))
    build = lambda size: as_example(build_or_model(size), "The function")  # noqa: E731
    return find_max_batch(build, start or FIRST_SIZE * grid, search, _name(build_or_model))


def _optimizers(given: Any) -> Optimizers:
    if callable(given) and not isinstance(given, torch.optim.Optimizer):
        return lambda model: listed(given(model))
    return lambda model: listed(given)


def _name(step: Any) -> str:
    return str(getattr(step, "__name__", type(step).__name__))


def find_max_batch(build: Build, start: int, search: BatchSearch, name: str) -> MaxBatch:
    """As `max_batch_size`, from a function alone."""
    scaling = scale(
        build,
        sample_sizes(start, search.grid),
        degree=DEGREES[search.axis],
        optimizers=search.optimizers,
        tell=search.tell,
    )
    example = build(start)
    blocks, device = repeated_blocks(example.model), _device_of(example)
    del example
    budget = search.budget.resolve(
        plain_peak_bytes=scaling.at(start).plain_peak_bytes, device_bytes=total_bytes(device)
    )
    hunt = _Hunt(
        build, scaling, replace(search, budget=Budget(float(budget), BudgetUnit.BYTES)), budget, blocks, device
    )
    return hunt.run(start, name)


def sample_sizes(start: int, grid: int, count: int = 4) -> tuple[int, ...]:
    """Sizes to capture and measure: below `start`, itself, and beyond, off any pattern that the others share."""
    smallest = max(SMALLEST, grid)
    start = max(start, smallest)
    sizes = {max(smallest, start * share // 4 // grid * grid) for share in (1, 2)} | {start, start + grid}
    step = 2
    while len(sizes) < count:
        sizes.add(start + step * grid)
        step += 1
    return tuple(sorted(sizes))


@dataclass(frozen=True, slots=True)
class _Hunt:
    """The search for three limits of one step under one budget."""

    build: Build
    scaling: Scaling
    search: BatchSearch
    budget: int
    blocks: tuple[str, ...]
    device: torch.device
    known: dict[str, list[Schedule]] = field(default_factory=dict)
    """Schedules with small peaks, by the graph they are for."""

    def run(self, start: int, name: str) -> MaxBatch:
        plain = self._limit(self._plain_fits, start, "plain")
        checkpointed = self._limit(self._blocks_fit, plain or start, "per-block checkpointing") if self.blocks else 0
        self.search.tell(f"looking for the largest {self.search.axis} for Remat")
        predicted = self._guess(self._ours_fits, checkpointed or plain or start)
        # Schedules are solved for at sizes that laws tell, where a look costs no capture.
        predicted = self._guess(self._ours_really_fits, predicted)
        ours = largest(lambda size: self._ours_really_fits(self._captured(size)), predicted, self.search.grid)
        if not ours:
            raise self._infeasible()
        plan, ours, peak, steps = self._confirm(ours)
        return MaxBatch(
            name=name,
            device=device_name(self.device),
            axis=self.search.axis,
            grid=self.search.grid,
            budget_bytes=self.budget,
            plain=Limit(plain, self.scaling.at(plain).plain_peak_bytes if plain else 0, 0.0),
            checkpointed=self._checkpointed(checkpointed) if self.blocks else None,
            ours=Limit(ours, plan.predicted_peak, plan.overhead),
            predicted=predicted,
            measured_peak_bytes=peak,
            real_steps=steps,
            time_error=self.scaling.law.time_error(predicted) if self.scaling.law is not None else 0.0,
            note=self.scaling.reason,
            offload=plan.offload,
        )

    def _guess(self, fits: Callable[[Sized], bool], start: int) -> int:
        """What the laws say."""
        return largest(lambda size: fits(self.scaling.at(size)), start, self.search.grid)

    def _limit(self, fits: Callable[[Sized], bool], start: int, what: str) -> int:
        """What the laws say; where they are not exact, what captures around it say then."""
        self.search.tell(f"looking for the largest {self.search.axis} for {what}")
        guess, law = self._guess(fits, start), self.scaling.law
        if law is not None and law.is_exact:
            return guess
        return largest(lambda size: fits(self._captured(size)), guess, self.search.grid)

    def _captured(self, size: int) -> Sized:
        if size not in self.scaling.seen:
            self.search.tell(f"capturing and measuring at {size}")
            gc.collect()
        return self.scaling.capture(size)

    def _plain_fits(self, sized: Sized) -> bool:
        return sized.plain_peak_bytes <= self.budget

    def _blocks_fit(self, sized: Sized) -> bool:
        return self._blocks_peak(sized.problem, block_schedule(sized.problem, self.blocks)) <= self.budget

    def _blocks_peak(self, problem: Problem, schedule: Schedule) -> int:
        if self.device.type == "cpu":
            return blocks_peak_bytes(problem, schedule, self.blocks, GENERATOR_BYTES)
        return self._peak(as_eager(problem), schedule)

    def _checkpointed(self, size: int) -> Limit:
        if not size:
            return Limit(0, 0, 0.0)
        problem = self.scaling.at(size).problem
        schedule = block_schedule(problem, self.blocks)
        time = simulate(problem, schedule).time_ns
        return Limit(size, self._blocks_peak(problem, schedule), time / max(problem.base_time_ns, 1e-9) - 1)

    def _ours_fits(self, sized: Sized) -> bool:
        return self._lowest(sized.problem) <= self.budget

    def _ours_really_fits(self, sized: Sized) -> bool:
        """As the planner would find out, which may know a lower peak than we do."""
        lowest = self._lowest(sized.problem)
        if lowest <= self.budget or self._copies_fit(sized):
            return True
        if lowest > NEARLY_RATIO * self.budget:
            return False
        try:
            found, _ = solve_within(
                sized.problem.with_budget(self.budget),
                "auto",
                rules=rules_of(self.device),
                time_limit_s=self.search.time_limit_s,
                seed=self.search.seed,
            )
        except InfeasibleBudget:
            return False
        assert found.schedule is not None, "what fits has a schedule"
        self._known(sized.problem).append(found.schedule)
        return True

    def _copies_fit(self, sized: Sized) -> bool:
        """Whether copies alone bring a schedule that is known within the budget."""
        place = place_for_plans(self.search.offload, self.device)
        if place is None or floor_bytes(sized.problem)[0] > self.budget:
            return False
        moving = with_host(sized.problem.with_budget(self.budget), sized.movable, place)
        made = (fit_by_copies(moving, schedule) for schedule in self._known(sized.problem))
        return any(steps is not None and self._peak(moving, steps) <= self.budget for steps in made)

    def _known(self, problem: Problem) -> list[Schedule]:
        return self.known.setdefault(graph_hash(problem.graph, ()), [plain_schedule(problem.graph)])

    def _lowest(self, problem: Problem) -> int:
        """The smallest peak known, or one that fits, or a floor that does not."""
        floor = floor_bytes(problem)[0]
        if floor > self.budget:
            return floor
        schedules = self._known(problem)
        peaks = [self._peak(problem, schedule) for schedule in schedules]
        if min(peaks) > self.budget:
            target = self.budget - rules_of(self.device).least_slack_bytes(problem)
            order = lower_order(problem)
            found = lowest_schedule(reordered(problem, order), target=target)
            schedules.append(translated(found, order))
            peaks.append(self._peak(problem, schedules[-1]))
        return min(peaks)

    def _peak(self, problem: Problem, schedule: Schedule) -> int:
        slack = rules_of(self.device).slack_bytes(problem, schedule)
        return simulate(problem, schedule).peak_bytes + slack

    def _confirm(self, size: int) -> tuple[Plan, int, int, int]:
        """The plan of a size that held when it really ran, that size, the peak it needed, and how many steps ran."""
        peak, steps = None, 0
        while steps < MOST_REAL_STEPS and size > 0:
            self.search.tell(f"running one step at {size}")
            try:
                plan, peak = self._run(size)
            except InfeasibleBudget:
                # Found on a quieter machine, or never to be found in time: nothing has run.
                size -= self.search.grid
                continue
            steps += 1
            if peak is not None and peak <= self.budget:
                return plan, size, peak, steps
            size -= self.search.grid
        if size <= 0:
            raise self._infeasible()
        needed = "more than the device has" if peak is None else format_bytes(peak)
        raise RematError(
            f"A step at {size + self.search.grid} needs {needed}, over the budget of {format_bytes(self.budget)}, "
            "though its plan fits; ask again with a smaller budget."
        )

    def _run(self, size: int) -> tuple[Plan, int | None]:
        """One real step under the plan for `size`, and its peak; None where the device ran out of memory."""
        gc.collect()
        example = self.build(size)
        search = self.search
        settings = Settings(
            search.budget,
            "auto",
            search.time_limit_s,
            search.seed,
            show_progress=False,
            offload=search.offload,
        )
        planned = plan_ahead(example.model, example.args, example.kwargs, settings, search.optimizers(example.model))
        try:
            return plan_of(planned), measure_once(planned, *example.args, **example.kwargs).peak_bytes
        except torch.OutOfMemoryError:
            return plan_of(planned), None
        finally:
            session_of(planned).owner.forget()

    def _infeasible(self) -> InfeasibleBudget:
        size = self.search.grid
        problem = self._captured(size).problem
        smallest = self._peak(problem, lowest_schedule(problem))
        return InfeasibleBudget(
            f"Budget {format_bytes(self.budget)} is below the {format_bytes(smallest)} that a {self.search.axis} of "
            f"{size} needs; raise the budget or make the model smaller.",
            smallest,
        )


def _device_of(example: Example) -> torch.device:
    return reachable_from(example.model, example.args, dict(example.kwargs)).device()
