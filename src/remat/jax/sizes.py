"""How large a batch, or how long a sequence, of a JAX loss fits a budget: plainly, and with Remat.

In: a loss, a function from a size to its arguments, and a budget. Out: a `MaxBatch`. Plainly is what XLA says of the
compiled step. For ours, the smallest peak that the model knows tells a size; the step of that size is planned and
compiled, and where it does not fit, what it lacked corrects the model for the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from remat.core.budget import Budget, BudgetUnit, format_bytes
from remat.core.results.max_batch import AXES, Limit, MaxBatch, check_axis
from remat.core.search.largest import largest
from remat.core.simulate import simulate
from remat.errors import BudgetError, InfeasibleBudget, RematError
from remat.jax.costs.compiled import StepMemory, compiler_options, default_device
from remat.jax.costs.timing import stopwatch
from remat.jax.graph.leaves import Leaves
from remat.jax.loop import Asked, FlatStep, Model, model_of, plain_memory
from remat.jax.planning import FlatFunction, Prepared, Wishes, prepare, step_of
from remat.solvers.search.floor import lowest_schedule

MOST_TRIES = 4


@dataclass(frozen=True, slots=True)
class SizeSearch:
    """What to find, and how."""

    budget: Budget
    axis: str = "batch"
    grid: int = 1
    asked: Asked = Asked()
    has_aux: bool = False
    tell: Callable[[str], None] = lambda message: None


def size_along(batch: Any, axis: str) -> int:
    """The batch size or sequence length of the arguments."""
    dimension = AXES[axis]
    for leaf in jax.tree.leaves(batch):
        if jnp.ndim(leaf) > dimension:
            return int(leaf.shape[dimension])
    raise RematError(f"No array of the batch has a dimension {dimension}, so there is no {axis} to change.")


def resized(batch: Any, axis: str, size: int) -> Any:
    """The same arguments, repeated or cut along the axis; arrays of another size there stay as they are."""
    dimension, before = AXES[axis], size_along(batch, axis)

    def change(leaf: Any) -> Any:
        if jnp.ndim(leaf) <= dimension or leaf.shape[dimension] != before:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            shape = (*leaf.shape[:dimension], size, *leaf.shape[dimension + 1 :])
            return jax.ShapeDtypeStruct(shape, leaf.dtype)
        return jnp.take(leaf, jnp.arange(size) % before, axis=dimension)

    return jax.tree.map(change, batch)


def find_max_batch(
    function: Callable[..., Any],
    build: Callable[[int], tuple[Any, ...]],
    usual: int,
    search: SizeSearch,
    name: str,
) -> MaxBatch:
    """`build` gives the arguments at a size; "2x" is of the temporaries at the `usual` one."""
    check_axis(search.axis, search.grid)
    hunt = _Hunt(function, build, search)
    hunt.budget = hunt.resolve(usual)
    search.tell(f"looking for the largest {search.axis} for plain jax")
    plain = largest(lambda size: hunt.plain(size) <= hunt.budget, usual, search.grid)
    predicted = hunt.predict(plain or usual)
    size, prepared = hunt.confirm(predicted, plain)
    device = default_device()
    return MaxBatch(
        name=name,
        device=f"{device.platform} {device.device_kind}",
        axis=search.axis,
        grid=search.grid,
        budget_bytes=hunt.budget,
        plain=Limit(plain, hunt.plain(plain) if plain else 0, 0.0),
        checkpointed=None,
        ours=Limit(size, prepared.plan.predicted_peak, prepared.plan.overhead),
        predicted=predicted,
        measured_peak_bytes=prepared.plan.predicted_peak,
        real_steps=0,
        time_error=0.0,
    )


@dataclass(slots=True)
class _Hunt:
    function: Callable[..., Any]
    build: Callable[[int], tuple[Any, ...]]
    search: SizeSearch
    budget: int = 0
    beyond: int = 0
    """What compiled steps were seen to need beyond the model's smallest peak."""
    plains: dict[int, int] = field(default_factory=dict)

    def flat(self, size: int) -> tuple[FlatFunction, tuple[bool, ...]]:
        leaves = Leaves.of(self.build(size), {})
        return FlatFunction(self.function, leaves, self.search.has_aux), leaves.chosen((0,))

    def step(self, size: int) -> tuple[FlatStep, Model]:
        step = step_of(*self.flat(size), compiler_options())
        # Whether a step fits does not depend on how long its equations take.
        return step, model_of(step, stopwatch(default_device(), 0.0))

    def compiled(self, size: int) -> tuple[Model, StepMemory]:
        step, model = self.step(size)
        return model, plain_memory(step, model)

    def plain(self, size: int) -> int:
        if size not in self.plains:
            model, memory = self.compiled(size)
            self.plains[size] = model.resident_total + memory.temporary_bytes
        return self.plains[size]

    def resolve(self, usual: int) -> int:
        budget = self.search.budget
        if budget.unit is BudgetUnit.BYTES:
            return int(budget.amount)
        if budget.unit is BudgetUnit.DEVICE_FRACTION:
            raise BudgetError('max-batch of a JAX loss takes bytes or a share of the plain step: "8GiB" or "2x".')
        model, memory = self.compiled(usual)
        return model.resident_total + int(budget.amount * memory.temporary_bytes)

    def lowest(self, size: int) -> int:
        """The smallest peak that the model knows."""
        _, model = self.step(size)
        return simulate(model.problem, lowest_schedule(model.problem)).peak_bytes

    def predict(self, guess: int) -> int:
        self.search.tell(f"looking for the largest {self.search.axis} for Remat")
        return largest(lambda size: self.lowest(size) + self.beyond <= self.budget, guess, self.search.grid)

    def confirm(self, size: int, plain: int) -> tuple[int, Prepared]:
        """The largest size at or below `size` that was planned and compiled; plainly it fits at `plain` at least."""
        refused: InfeasibleBudget | None = None
        for _ in range(MOST_TRIES):
            if size <= plain:
                break
            self.search.tell(f"planning and compiling at {size}")
            try:
                return size, self.prepared(size)
            except InfeasibleBudget as error:
                refused = error
                self.beyond = max(self.beyond, error.min_budget - self.lowest(size))
                size = min(self.predict(size), size - self.search.grid)
        if plain:
            return plain, self.prepared(plain)
        least = refused.min_budget if refused else self.lowest(self.search.grid)
        raise InfeasibleBudget(
            f"Budget {format_bytes(self.budget)} is below the {format_bytes(least)} that a {self.search.axis} of "
            f"{self.search.grid} needs; raise the budget or make the model smaller.",
            least,
        )

    def prepared(self, size: int) -> Prepared:
        budget = Budget(float(self.budget), BudgetUnit.BYTES)
        wishes = Wishes(budget, self.search.has_aux, self.search.asked, compiler_options())
        return prepare(*self.flat(size), wishes)
