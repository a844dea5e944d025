"""What a function checkpoints, and the same function under another policy.

In: a traced function. Out: its `Region`s, each with how often it runs, and the function with their policies replaced. A
function that checkpoints nothing is one region as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from remat.jax import _compat

CHECKPOINTS = ("checkpoint", "remat2")


@dataclass(frozen=True, slots=True)
class Region:
    """One function that is checkpointed."""

    closed: Any
    count: int
    """How often it runs in a step: the lengths of the scans around it."""


def regions_of(traced: Any) -> tuple[Region, ...]:
    return tuple(_regions(traced.jaxpr, 1)) or (Region(traced, 1),)


def _regions(jaxpr: Any, count: int) -> Iterator[Region]:
    for equation in jaxpr.eqns:
        if equation.primitive.name in CHECKPOINTS:
            yield Region(_compat.closed(equation.params["jaxpr"]), count)
        else:
            times = count * equation.params["length"] if equation.primitive.name == "scan" else count
            for inner in _inner(equation):
                yield from _regions(inner, times)


def _inner(equation: Any) -> list[Any]:
    """Functions that are differentiated as they are written."""
    if equation.primitive.name == "custom_vjp_call":
        return []
    found = [equation.params.get(key) for key in ("jaxpr", "call_jaxpr")]
    return [getattr(item, "jaxpr", item) for item in found if item is not None]


def under_policy(traced: Any, policy: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The function that was traced, with `policy` wherever it checkpoints, or around all of it."""
    if not any(True for _ in _regions(traced.jaxpr, 1)):
        return jax.checkpoint(_compat.as_function(traced), policy=policy)
    return _compat.as_function(_replaced(traced, policy))


def _replaced(jaxpr: Any, policy: Callable[..., Any]) -> Any:
    """A jaxpr, closed or not, with other policies in it."""
    if _compat.is_wrapped(jaxpr):
        return jaxpr.replace(jaxpr=_replaced(jaxpr.jaxpr, policy))
    return jaxpr.replace(eqns=[_with(equation, policy) for equation in jaxpr.eqns])


def _with(equation: Any, policy: Callable[..., Any]) -> Any:
    if equation.primitive.name in CHECKPOINTS:
        return equation.replace(params={**equation.params, "policy": policy})
    if not _inner(equation):
        return equation
    changed = {
        key: _replaced(equation.params[key], policy)
        for key in ("jaxpr", "call_jaxpr")
        if equation.params.get(key) is not None
    }
    return equation.replace(params={**equation.params, **changed})
