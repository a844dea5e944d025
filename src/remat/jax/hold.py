"""How segments stay in their order inside XLA.

In: a function, its values, and a token of the segment before. Out: its results and a token for the next. On GPU and
TPU, optimization barriers stand until the order is decided. XLA for CPUs removes them before that; there a conditional
whose condition is always true, which XLA cannot know, holds its content together and waits for the segment before.
Convolutions inside conditionals lose their fast kernels on CPUs: programs with them are held by barriers there too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp

from remat.jax import _compat
from remat.jax.program import Program
from remat.jax.replay import Hold

SLOW_INSIDE = ("conv_general_dilated",)


class Means(Enum):
    """What holds segments in their order."""

    BARRIERS = "barriers"
    CONDITIONALS = "conditionals"


def means_for(program: Program, platform: str) -> Means:
    if platform != "cpu" or any(equation.primitive.name in SLOW_INSIDE for equation in program.equations):
        return Means.BARRIERS
    return Means.CONDITIONALS


def holder(means: Means) -> Hold:
    return hold_by_condition if means is Means.CONDITIONALS else hold_by_barrier


def first_token(means: Means, arguments: Sequence[Any]) -> Any:
    """Something that is only known when the step runs: the first bits of an argument."""
    if means is Means.BARRIERS:
        return ()
    for argument in arguments:
        if argument.size and jax.dtypes.issubdtype(argument.dtype, jnp.inexact):
            first = jnp.real(jax.lax.slice(argument.reshape(-1), (0,), (1,))[0]).astype(jnp.float32)
            return jax.lax.bitcast_convert_type(first, jnp.int32)
    return None


def hold_by_barrier(run: Callable[..., list[Any]], values: list[Any], token: Any) -> tuple[list[Any], Any]:
    """Nothing of `run` begins before all of the token is there."""
    values, _ = jax.lax.optimization_barrier((values, token))
    made = run(*values)
    return made, tuple(made)


def hold_by_condition(run: Callable[..., list[Any]], values: list[Any], token: Any) -> tuple[list[Any], Any]:
    """`run` inside a branch that is always taken."""
    if token is None:
        return run(*values), None

    def taken(token: Any, *given: Any) -> tuple[list[Any], Any]:
        return run(*given), token

    shapes = jax.eval_shape(run, *values)

    def never(token: Any, *given: Any) -> tuple[list[Any], Any]:
        return [_compat.zeros(shape) for shape in shapes], token + 1

    # No 32 bits have more than 32 ones, which XLA does not look into.
    always = jax.lax.population_count(token) <= 32
    return jax.lax.cond(always, taken, never, token, *values)
