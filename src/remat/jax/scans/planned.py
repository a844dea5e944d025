"""A scan that runs under plans of its body: forward saves, backward makes the rest again.

In: a scan's equation, its values, and runs of iterations with a plan each. Out: its results, by a function with a
derivative of its own. Iterations read their slices of the inputs and write their slices of results and gradients in
place, so that cutting the iterations into runs copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from remat.jax import _compat
from remat.jax.scans.body import Body
from remat.jax.scans.split import IterationRun

Choose = Callable[[Sequence[bool]], tuple[Body, tuple[IterationRun, ...]]]
"""From which inputs are differentiated to what is run."""


def planned_scan(
    primitive: Any, params: dict[str, Any], context: Any, values: Sequence[Any], choose: Choose
) -> list[Any]:
    """What the equation computes, with a backward that follows plans."""
    used: list[_Planned] = []

    @jax.custom_vjp
    def run(*given: Any) -> list[Any]:
        return _compat.bind(primitive, params, context, given)

    def forward(*primals: Any) -> tuple[list[Any], Any]:
        given = [item.value for item in primals]
        planned = _Planned(*choose([bool(item.perturbed) for item in primals]))
        used.append(planned)
        results, saved = planned.forward(given)
        return results, (given, saved)

    def backward(kept: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        return used[-1].backward(kept[0], kept[1], list(cotangents))

    run.defvjp(forward, backward, symbolic_zeros=True)
    return list(run(*values))


@dataclass(frozen=True, slots=True)
class _Planned:
    body: Body
    runs: tuple[IterationRun, ...]

    def _parts(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        shape = self.body.shape
        first, second = shape.constants, shape.constants + shape.carries
        return list(values[:first]), list(values[first:second]), list(values[second:])

    def _places(self) -> list[Any]:
        """For each run, which iterations it has, in the order in which forward runs them."""
        length, done, found = self.body.shape.length, 0, []
        for run in self.runs:
            places = jnp.arange(done, done + run.count, dtype=jnp.int32)
            found.append(length - 1 - places if self.body.shape.reverse else places)
            done += run.count
        return found

    def forward(self, values: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
        constants, carry, slices = self._parts(values)
        program, count = self.body.captured.program, len(carry)
        rows = [program.aval_of(atom) for atom in program.results[count:]]
        rest = [_compat.zeros(_stacked(row, self.body.shape.length)) for row in rows]
        saved: list[list[Any]] = []
        for run, places in zip(self.runs, self._places(), strict=True):

            def iteration(state: Any, place: Any, run: IterationRun = run) -> tuple[Any, list[Any]]:
                carry, rest = state
                row = [_row(item, place) for item in slices]
                results, kept = run.plan.replay.forward([*constants, *carry, *row], None, None)
                return (results[:count], _written(rest, results[count:], place)), kept

            (carry, rest), kept = jax.lax.scan(iteration, (carry, rest), places)
            saved.append(kept)
        return [*carry, *rest], saved

    def backward(self, values: Sequence[Any], saved: list[list[Any]], cotangents: list[Any]) -> tuple[Any, ...]:
        constants, carry, slices = self._parts(values)
        wanted, followed = self.body.captured.wanted, self.body.captured.followed
        count, first = len(carry), len(constants)
        moving = [
            _compat.instantiated(item) for item, follow in zip(cotangents[:count], followed, strict=False) if follow
        ]
        totals = [jnp.zeros_like(item) for item, want in zip(constants, wanted, strict=False) if want]
        written = [jnp.zeros_like(item) for item, want in zip(slices, wanted[first + count :], strict=True) if want]
        rows = [item for item, follow in zip(cotangents[count:], followed[count:], strict=True) if follow]
        nothing = [None] * count
        for run, places, kept in reversed(list(zip(self.runs, self._places(), saved, strict=True))):

            def iteration(state: Any, item: Any, run: IterationRun = run) -> tuple[Any, None]:
                moving, totals, written = state
                place, kept = item
                row = [_row(part, place) for part in slices]
                given = [*moving, *(_row_or_zeros(part, place) for part in rows)]
                found = run.plan.replay.backward([*constants, *nothing, *row], kept, given, None, None)
                ahead, behind = len(totals), len(totals) + len(moving)
                totals = [total + more for total, more in zip(totals, found[:ahead], strict=True)]
                return (found[ahead:behind], totals, _written(written, found[behind:], place)), None

            (moving, totals, written), _ = jax.lax.scan(
                iteration, (moving, totals, written), (places, kept), reverse=True
            )
        found = iter([*totals, *moving, *written])
        return tuple(next(found) if want else None for want in wanted)


def _row(array: Any, place: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(array, place, keepdims=False)


def _row_or_zeros(cotangent: Any, place: Any) -> Any:
    """Of a cotangent that jax knows to be zero, no array is made for all iterations."""
    known = _compat.zero_aval(cotangent)
    if known is None:
        return _row(cotangent, place)
    return jnp.zeros(known.shape[1:], known.dtype)


def _written(arrays: Sequence[Any], rows: Sequence[Any], place: Any) -> list[Any]:
    return [jax.lax.dynamic_update_index_in_dim(array, row, place, 0) for array, row in zip(arrays, rows, strict=True)]


def _stacked(aval: Any, length: int) -> Any:
    return jax.ShapeDtypeStruct((length, *aval.shape), aval.dtype)
