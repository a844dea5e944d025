"""A scan that runs under plans of its body: forward saves, backward makes the rest again.

In: a scan's equation, its values, and runs of iterations with a plan each. Out: its results, by a function with a
derivative of its own. Iterations read their slices of the inputs and write their slices of results and gradients in
place, so that cutting the iterations into runs copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from remat.jax import _compat
from remat.jax.run.hold import Means, first_token, holder
from remat.jax.scans.body import Body
from remat.jax.scans.split import IterationRun


@dataclass(frozen=True, slots=True)
class ScanChoice:
    """How the iterations of one scan run."""

    body: Body
    runs: tuple[IterationRun, ...]
    means: Means = Means.NOTHING
    """What holds the order inside the backward of an iteration."""


Choose = Callable[[Sequence[bool]], ScanChoice]
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
        planned = _Planned(choose([bool(item.perturbed) for item in primals]))
        used.append(planned)
        results, saved = planned.forward(given)
        return results, (given, saved)

    def backward(kept: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        return used[-1].backward(kept[0], kept[1], list(cotangents))

    run.defvjp(forward, backward, symbolic_zeros=True)
    return list(run(*values))


@dataclass(frozen=True, slots=True)
class _Planned:
    choice: ScanChoice

    @property
    def body(self) -> Body:
        return self.choice.body

    @property
    def runs(self) -> tuple[IterationRun, ...]:
        return self.choice.runs

    def _parts(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        shape = self.body.shape
        first, second = shape.constants, shape.constants + shape.carries
        return list(values[:first]), list(values[first:second]), list(values[second:])

    def _starts(self) -> list[int]:
        """For each run, how many iterations forward has behind it when it begins."""
        return [0, *accumulate(run.count for run in self.runs)][:-1]

    def _row_number(self, done: Any) -> Any:
        """Which row of the inputs the iteration reads that comes after so many; `done` is counted, not looked up."""
        return self.body.shape.length - 1 - done if self.body.shape.reverse else done

    def forward(self, values: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
        constants, carry, slices = self._parts(values)
        program, count = self.body.captured.program, len(carry)
        rows = [program.aval_of(atom) for atom in program.results[count:]]
        rest = [_compat.zeros(_compat.stacked(row, self.body.shape.length)) for row in rows]
        saved: list[list[Any]] = []
        for run, start in zip(self.runs, self._starts(), strict=True):

            def iteration(state: Any, _: None, run: IterationRun = run) -> tuple[Any, list[Any]]:
                done, carry, rest = state
                place = self._row_number(done)
                row = [_row(item, place) for item in slices]
                results, kept = run.plan.replay.forward([*constants, *carry, *row], None, None)
                return (done + 1, results[:count], _written(rest, results[count:], place)), kept

            state = (jnp.int32(start), carry, rest)
            (_, carry, rest), kept = jax.lax.scan(iteration, state, None, length=run.count)
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
        nothing, means = [None] * count, self.choice.means
        for run, start, kept in reversed(list(zip(self.runs, self._starts(), saved, strict=True))):

            def iteration(state: Any, kept: Any, run: IterationRun = run) -> tuple[Any, None]:
                done, moving, totals, written = state
                place = self._row_number(done - 1)
                row = [_row(part, place) for part in slices]
                given = [*moving, *(_row_or_zeros(part, place) for part in rows)]
                token = first_token(means, [*row, *kept, *given])
                found = run.plan.replay.backward([*constants, *nothing, *row], kept, given, holder(means), token)
                ahead, behind = len(totals), len(totals) + len(moving)
                totals = [total + more for total, more in zip(totals, found[:ahead], strict=True)]
                return (done - 1, found[ahead:behind], totals, _written(written, found[behind:], place)), None

            state = (jnp.int32(start + run.count), moving, totals, written)
            (_, moving, totals, written), _ = jax.lax.scan(iteration, state, kept, length=run.count, reverse=True)
        found = iter([*totals, *moving, *written])
        return tuple(next(found) if want else None for want in wanted)


def _row(array: Any, place: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(array, place, keepdims=False)


def _row_or_zeros(cotangent: Any, place: Any) -> Any:
    """Of a cotangent that jax knows to be zero, no array is made for all iterations."""
    known = _compat.zero_aval(cotangent)
    if known is None:
        return _row(cotangent, place)
    return _compat.zeros(jax.eval_shape(lambda: _row(_compat.zeros(known), 0)))


def _written(arrays: Sequence[Any], rows: Sequence[Any], place: Any) -> list[Any]:
    return [jax.lax.dynamic_update_index_in_dim(array, row, place, 0) for array, row in zip(arrays, rows, strict=True)]
