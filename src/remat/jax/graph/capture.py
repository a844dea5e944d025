"""Forward and backward of a function, traced apart and joined.

In: a function of flat leaves, their shapes, and which of them are differentiated. Out: a `JoinedStep`. `jax.vjp` gives
a function that is a pytree whose leaves are what backward takes from forward: tracing it apart gives an exact split,
and its leaves join the two halves again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from remat.errors import CaptureError
from remat.jax import _compat
from remat.jax.graph.program import Atom, ProgramBuilder, StepProgram, program_of, pruned


@dataclass(frozen=True, slots=True)
class JoinedStep:
    program: StepProgram
    wanted: tuple[bool, ...]
    """Of each argument, whether backward computes its gradient."""
    followed: tuple[bool, ...]
    """Of each result, whether backward takes a cotangent for it."""


def capture(
    function: Callable[..., list[Any]],
    avals: Sequence[Any],
    wanted: Sequence[bool],
    followed_results: int | None = None,
) -> JoinedStep:
    """Trace `function`, of flat arguments and with a flat list of results.

    Gradients of the `wanted` arguments are computed from cotangents of the first `followed_results` results (all by
    default) as far as these have derivatives.
    """
    trees: dict[str, Any] = {}

    def forward(*leaves: Any) -> tuple[list[Any], list[Any]]:
        def of(*moving: Any) -> tuple[list[Any], list[Any]]:
            given = iter(moving)
            found = function(*(next(given) if want else leaf for leaf, want in zip(leaves, wanted, strict=True)))
            trees["followed"] = followed = _followed(found, followed_results)
            return [item for item, follow in zip(found, followed, strict=True) if follow], found

        moving = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        _, pull, results = jax.vjp(of, *moving, has_aux=True)
        residuals, trees["pull"] = jax.tree.flatten(pull)
        return results, residuals

    ahead, shapes = _traced(forward, avals)
    results, residuals = shapes
    followed = trees["followed"]
    cotangents = [item for item, follow in zip(results, followed, strict=True) if follow]

    def backward(saved: list[Any], given: list[Any]) -> list[Any]:
        return list(jax.tree.unflatten(trees["pull"], saved)(given))

    back, _ = _traced(backward, (residuals, cotangents))
    return JoinedStep(_joined(ahead, back, len(results)), tuple(wanted), followed)


def capture_whole(function: Callable[..., list[Any]], avals: Sequence[Any]) -> JoinedStep:
    """A function that computes its gradients itself, as one program."""
    return JoinedStep(program_of(trace(function, avals)), (), ())


def _followed(results: Sequence[Any], count: int | None) -> tuple[bool, ...]:
    most = len(results) if count is None else count
    return tuple(place < most and _compat.is_differentiable(jax.typeof(item)) for place, item in enumerate(results))


def trace(function: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """The function's jaxpr; refused where it has effects, or reads values of a trace around it."""
    return _traced(function, avals)[0]


def _traced(function: Callable[..., Any], avals: Sequence[Any]) -> tuple[Any, Any]:
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*avals)
    if any(isinstance(value, jax.core.Tracer) for value in traced.consts):
        raise CaptureError("The function reads a value of a transformation around it; hand it over as an argument.")
    forbidden = _compat.forbidden_effects(traced.jaxpr)
    if forbidden:
        raise CaptureError(
            f"The function has the effect {forbidden[0]}, which must happen exactly once; move it out of the function."
        )
    return traced, shapes


def _joined(ahead: Any, back: Any, result_count: int) -> StepProgram:
    builder = ProgramBuilder()
    arguments = [builder.new(variable.aval) for variable in ahead.jaxpr.invars]
    found = builder.add(ahead.jaxpr, ahead.consts, arguments, backward=False)
    results, residuals = found[:result_count], found[result_count:]
    cotangents = [builder.new(variable.aval) for variable in back.jaxpr.invars[len(residuals) :]]
    given: list[Atom] = [*residuals, *cotangents]
    gradients = builder.add(back.jaxpr, back.consts, given, backward=True)
    return pruned(
        StepProgram(
            tuple(builder.equations),
            tuple(builder.avals),
            tuple(arguments),
            tuple(builder.constants),
            tuple(cotangents),
            tuple(results),
            tuple(gradients),
        )
    )
