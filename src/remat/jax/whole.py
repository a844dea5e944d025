"""`remat.jax.compile`: a whole training step, its gradients and its optimizer included, within a budget.

In: a step, such as one that calls `jax.value_and_grad` and optax, and a budget. Out: the same step, compiled. Nothing
says where its forward ends, so that all of its equations are scheduled as one program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any

import jax

from remat.core.budget import parse_budget
from remat.core.results.plan import Plan
from remat.errors import CaptureError
from remat.jax.costs.compiled import compiler_options
from remat.jax.graph.leaves import Leaves
from remat.jax.loop import Asked, replayed
from remat.jax.planning import FlatFunction, Prepared, Wishes, prepare


class CompiledTraining:
    """A step that is planned and compiled at its first call, and for each new shape."""

    def __init__(self, step: Callable[..., Any], wishes: Wishes) -> None:
        update_wrapper(self, step)
        self.step, self.wishes = step, wishes
        self.prepared: dict[Any, tuple[Prepared, FlatFunction, Callable[..., Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = Leaves.of(args, kwargs)
        key = leaves.key()
        if key not in self.prepared:
            self.prepared[key] = self._compiled(leaves)
        flat, run = self.prepared[key][1:]
        return flat.finished(run(*leaves.arrays), args, kwargs)

    def _compiled(self, leaves: Leaves) -> tuple[Prepared, FlatFunction, Callable[..., Any]]:
        flat = FlatFunction(self.step, leaves, has_aux=False)
        prepared = prepare(flat, None, self.wishes)
        pull = replayed(prepared.replay, prepared.means)

        def run(*arrays: Any) -> Any:
            return pull(arrays, ())[0]

        return prepared, flat, jax.jit(run, compiler_options=dict(self.wishes.options or {}))

    @property
    def plan(self) -> Plan:
        """The plan in use; the last one that was made."""
        if not self.prepared:
            raise CaptureError("There is no plan yet: it is made at the first call of the step.")
        return list(self.prepared.values())[-1][0].plan


def compile(
    step: Callable[..., Any],
    budget: str | float,
    *,
    solver: str = "auto",
    time_limit_s: float = 4.0,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> CompiledTraining:
    """`step` as a compiled function whose arguments, results and temporaries fit `budget`."""
    chosen = compiler_options() if options is None else options
    return CompiledTraining(step, Wishes(parse_budget(budget), False, Asked(solver, time_limit_s, seed), chosen))
