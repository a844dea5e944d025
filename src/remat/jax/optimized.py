"""`remat.jax.optimize` and its relatives: a loss function in, a loss function out that trains within a budget.

In: a function and a budget. Out: the same function with a backward of its own. The plan is made when the function is
first differentiated, while jax traces it: then it is known which arguments are. Other shapes, or other arguments
differentiated, get plans of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from typing import Any

import jax

from remat.core.budget import parse_budget
from remat.core.results.plan import Plan
from remat.errors import CaptureError, RematError
from remat.jax import _compat
from remat.jax.costs.compiled import compiler_options
from remat.jax.graph.leaves import Leaves
from remat.jax.loop import Asked
from remat.jax.planning import FlatFunction, Prepared, Wishes, prepare, prepare_from
from remat.jax.run.hold import first_token, holder


class Optimized:
    """A function with the same results and gradients, whose backward follows a plan."""

    def __init__(
        self, function: Callable[..., Any], wishes: Wishes, argnums: tuple[int, ...], plan: Plan | None = None
    ) -> None:
        update_wrapper(self, function)
        self.function, self.wishes, self.argnums, self.given = function, wishes, argnums, plan
        self.prepared: dict[Any, tuple[Prepared, FlatFunction]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = Leaves.of(args, kwargs)
        flat = FlatFunction(self.function, leaves, self.wishes.has_aux)
        results = _with_backward(self, flat)(*leaves.arrays)
        results = [item if place < flat.followed else jax.lax.stop_gradient(item) for place, item in enumerate(results)]
        return flat.finished(results, args, kwargs)

    def prepare(self, flat: FlatFunction, wanted: Sequence[bool]) -> Prepared:
        """What runs for calls like this one; planned at the first of them."""
        key = (flat.leaves.key(), tuple(wanted))
        if key not in self.prepared:
            if self.given is not None:
                self.prepared[key] = prepare_from(self.given, flat, wanted, self.wishes), flat
            else:
                self.prepared[key] = prepare(flat, wanted, self.wishes), flat
        prepared, known = self.prepared[key]
        flat.tree, flat.followed, flat.changed = known.tree, known.followed, known.changed
        return prepared

    def plan_for(self, *args: Any, **kwargs: Any) -> Prepared:
        """Plan ahead of time, for the arguments in `argnums`."""
        leaves = Leaves.of(args, kwargs)
        flat = FlatFunction(self.function, leaves, self.wishes.has_aux)
        return self.prepare(flat, leaves.chosen(self.argnums))


def _with_backward(optimized: Optimized, flat: FlatFunction) -> Callable[..., list[Any]]:
    used: list[Prepared] = []

    @jax.custom_vjp
    def run(*arrays: Any) -> list[Any]:
        return flat(*arrays)

    def forward(*primals: Any) -> tuple[list[Any], Any]:
        values = tuple(item.value for item in primals)
        wanted = [item.perturbed and _compat.is_differentiable(jax.typeof(item.value)) for item in primals]
        prepared = optimized.prepare(flat, wanted)
        used.append(prepared)
        means = prepared.means
        results, saved = prepared.replay.forward(values, holder(means), first_token(means, values))
        return results, (values, saved, tuple(wanted))

    def backward(kept: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        values, saved, _ = kept
        prepared = used[-1]
        given = [
            _compat.instantiated(item)
            for item, follow in zip(cotangents, prepared.model.captured.followed, strict=True)
            if follow
        ]
        means = prepared.means
        found = iter(prepared.replay.backward(values, saved, given, holder(means), first_token(means, values)))
        return tuple(next(found) if want else None for want in prepared.model.captured.wanted)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def optimize(
    function: Callable[..., Any],
    budget: str | float,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    solver: str = "auto",
    time_limit_s: float = 4.0,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Optimized:
    """`function` with a backward that fits `budget`, to be used under `jax.jit`, `jax.grad` and `jax.value_and_grad`.

    The budget bounds arguments, results and temporaries of forward and backward together; "0.5x" is half of the plain
    step's temporaries. `options` are the compiler's; by default those of `compiler_options()`.
    """
    return Optimized(function, _wishes(budget, has_aux, solver, time_limit_s, seed, options), _numbers(argnums))


def plan(
    function: Callable[..., Any],
    *args: Any,
    budget: str | float,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    solver: str = "auto",
    time_limit_s: float = 4.0,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Plan:
    """The plan for `jax.value_and_grad(function, argnums)(*args)`; arrays may be `jax.ShapeDtypeStruct`s."""
    wishes = _wishes(budget, has_aux, solver, time_limit_s, seed, options)
    return Optimized(function, wishes, _numbers(argnums)).plan_for(*args, **kwargs).plan


def apply(function: Callable[..., Any], plan: Plan, *, has_aux: bool = False) -> Optimized:
    """`function` under a plan that was made before, as one loaded from a file."""
    return Optimized(function, Wishes(parse_budget(plan.budget_bytes), has_aux), (0,), plan)


def plan_of(optimized: Optimized) -> Plan:
    """The plan in use; the last one that was made."""
    if not isinstance(optimized, Optimized):
        raise RematError(f"plan_of takes what remat.jax.optimize returned; it was given a {type(optimized).__name__}.")
    if not optimized.prepared:
        raise CaptureError("There is no plan yet: it is made when the function is first differentiated.")
    return list(optimized.prepared.values())[-1][0].plan


def _wishes(
    budget: str | float, has_aux: bool, solver: str, limit_s: float, seed: int, options: Mapping[str, Any] | None
) -> Wishes:
    chosen = compiler_options() if options is None else options
    return Wishes(parse_budget(budget), has_aux, Asked(solver, limit_s, seed), chosen)


def _numbers(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)
