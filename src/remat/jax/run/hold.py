"""How segments stay in their order inside XLA.

In: a function, its values, and a token of the segment before. Out: its results and a token for the next. On GPU and
TPU, optimization barriers stand until the order is decided. XLA for CPUs removes them before that; there a conditional
whose condition is always true, which XLA cannot know, holds its content together and waits for the segment before.
Convolutions inside conditionals lose their fast kernels on CPUs, so those stand outside: the smallest thing that they
read comes out of a conditional, and the next token out of what they make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp

from remat.jax import _compat
from remat.jax.run.replay import Hold

SLOW_INSIDE = ("conv_general_dilated",)


class Means(Enum):
    """What holds segments in their order."""

    BARRIERS = "barriers"
    CONDITIONALS = "conditionals"
    NOTHING = "nothing"
    """Where nothing is run twice, the order may be XLA's own."""


def means_for(platform: str) -> Means:
    return Means.CONDITIONALS if platform == "cpu" else Means.BARRIERS


def holder(means: Means) -> Hold | None:
    """None where segments are not held."""
    return {Means.CONDITIONALS: hold_by_condition, Means.BARRIERS: hold_by_barrier, Means.NOTHING: None}[means]


def first_token(means: Means, arguments: Sequence[Any]) -> Any:
    """Something that is only known when the step runs: the first bits of an argument that every device has.

    Where each has a part of every argument only, the largest number of the smallest is known to all.
    """
    if means is not Means.CONDITIONALS:
        return ()
    for argument in arguments:
        bits = _bits_of(argument)
        if bits is not None:
            return bits
    split = [item for item in arguments if item.size and jax.dtypes.issubdtype(item.dtype, jnp.floating)]
    return _bits_of(min(split, key=lambda item: item.size).max()) if split else None


def hold_by_barrier(
    run: Callable[..., list[Any]], values: list[Any], token: Any, primitives: frozenset[str]
) -> tuple[list[Any], Any]:
    """Nothing of `run` begins before all of the token is there."""
    values, _ = jax.lax.optimization_barrier((values, token))
    made = run(*values)
    return made, tuple(made)


def hold_by_condition(
    run: Callable[..., list[Any]], values: list[Any], token: Any, primitives: frozenset[str]
) -> tuple[list[Any], Any]:
    """`run` inside a branch that is always taken."""
    if token is None:
        return run(*values), None
    if not primitives.isdisjoint(SLOW_INSIDE):
        return _hold_by_input(run, values, token)
    return _in_branch(run, values, token)


def _in_branch(run: Callable[..., list[Any]], values: list[Any], token: Any) -> tuple[list[Any], Any]:
    def taken(token: Any, *given: Any) -> tuple[list[Any], Any]:
        return run(*given), token

    shapes = jax.eval_shape(run, *values)

    def never(token: Any, *given: Any) -> tuple[list[Any], Any]:
        return [_compat.zeros(shape) for shape in shapes], token + 1

    made, after = jax.lax.cond(_always(token), taken, never, token, *values)
    return made, after


def _hold_by_input(run: Callable[..., list[Any]], values: list[Any], token: Any) -> tuple[list[Any], Any]:
    """What waits for one of its inputs waits, and what waits for one of its outputs follows."""
    smallest = min(range(len(values)), key=lambda place: values[place].size)
    (held,), token = _in_branch(lambda value: [value], [values[smallest]], token)
    made = run(*(held if place == smallest else value for place, value in enumerate(values)))
    for item in made:
        bits = _bits_of(item)
        if bits is not None:
            token = token + (jax.lax.population_count(bits) > 32).astype(jnp.int32)
    return made, token


def _always(token: Any) -> Any:
    """True: no 32 bits have more than 32 ones, which XLA does not look into."""
    return jax.lax.population_count(token) <= 32


def _bits_of(array: Any) -> Any:
    """The first 32 bits or so of an array of floats; None of any other, or where they lie on one device of several."""
    if not array.size or not jax.dtypes.issubdtype(array.dtype, jnp.inexact):
        return None
    if _compat.is_split(jax.typeof(array)):
        return None
    first = jnp.real(jax.lax.slice(array, (0,) * array.ndim, (1,) * array.ndim).reshape(())).astype(jnp.float32)
    return jax.lax.bitcast_convert_type(first, jnp.int32)
