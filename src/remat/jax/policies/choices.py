"""What a policy can tell apart, and which of it to save.

In: the regions that a function checkpoints. Out: a frontier of `PolicyChoice`s: for each kind of value whether it is
saved, offloaded or made again, the bytes that takes, and the time of making the rest again. A kind is a name given by
`checkpoint_name`; where a function names nothing, a primitive with its shapes, which is all that a policy sees.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from remat.jax import _compat
from remat.jax.costs.op_costs import equation_ns
from remat.jax.costs.timing import Stopwatch
from remat.jax.graph.capture import capture
from remat.jax.graph.primitives import FUSED
from remat.jax.graph.program import Equation, StepProgram
from remat.jax.policies.regions import Region

Kind = tuple[Any, ...]
"""("name", a name), or a primitive with the shapes that it reads and makes."""
MOST_TRIED = 5000
"""Up to so many choices, all are looked at; beyond, one kind at a time is changed for what saves most per byte."""


class KeptAt(StrEnum):
    """Where a value is between forward and backward, in the words of MaxText's settings."""

    DEVICE = "device"
    OFFLOAD = "offload"
    REMAT = "remat"


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    places: tuple[tuple[Kind, KeptAt], ...]
    saved_bytes: int
    """On the device."""
    time_ns: float
    """Of what is made again, and of copies to the host and back."""


@dataclass(frozen=True, slots=True)
class Forward:
    """A region's forward as far as its backward needs it."""

    count: int
    needed: frozenset[int]
    """Values that backward reads."""
    maker: Mapping[int, tuple[int, Equation]]
    """Of each value, the number of the equation that makes it, and that equation."""
    kind_of: Mapping[int, Kind]
    bytes_of: Mapping[int, int]
    time_ns: Mapping[int, float]
    """Of each equation."""

    def cost(self, places: Mapping[Kind, KeptAt]) -> tuple[int, int, float]:
        """Bytes on the device, bytes on the host, and the time of what is made again; all iterations together."""
        saved = {KeptAt.DEVICE: 0, KeptAt.OFFLOAD: 0}
        time, seen, again = 0.0, set[int](), set[int]()
        left = list(self.needed)
        while left:
            value = left.pop()
            if value in seen or value not in self.maker:
                continue
            seen.add(value)
            place = places.get(self.kind_of.get(value, ()), KeptAt.REMAT)
            if place is not KeptAt.REMAT:
                saved[place] += self.bytes_of[value]
                continue
            number, equation = self.maker[value]
            if number not in again:
                again.add(number)
                time += self.time_ns[number]
                left += equation.reads
        return self.count * saved[KeptAt.DEVICE], self.count * saved[KeptAt.OFFLOAD], self.count * time


def forwards_of(regions: Sequence[Region], watch: Stopwatch) -> list[Forward]:
    """One for each distinct region."""
    counts: dict[str, tuple[Region, int]] = {}
    for region in regions:
        _, known = counts.get(str(region.closed), (region, 0))
        counts[str(region.closed)] = region, known + region.count
    return [_forward(region, count, watch) for region, count in counts.values()]


def _forward(region: Region, count: int, watch: Stopwatch) -> Forward:
    avals = region.closed.in_avals
    run = _compat.as_function(region.closed)
    program = capture(lambda *values: list(run(*values)), avals, list(map(_compat.is_differentiable, avals))).program
    ahead = [(number, item) for number, item in enumerate(program.equations) if not item.backward]
    maker: dict[int, tuple[int, Equation]] = {
        output: (number, item) for number, item in ahead for output in item.outputs
    }
    read = {value for item in program.equations if item.backward for value in item.reads}
    times = {number: equation_ns(program, item, watch) for number, item in ahead}
    kinds: dict[int, Kind] = {output: _kind(program, item) for _, item in ahead for output in item.outputs}
    sizes: dict[int, int] = {output: program.bytes_of(output) for output in maker}
    return Forward(count, frozenset(read & maker.keys()), maker, kinds, sizes, times)


def _kind(program: StepProgram, equation: Equation) -> Kind:
    name = equation.primitive.name
    if name == "name":
        return ("name", equation.params["name"])
    if name in FUSED:
        return ()
    return name, tuple(_compat.described(program.aval_of(atom)) for atom in equation.inputs)


def kinds_of(forwards: Sequence[Forward]) -> list[Kind]:
    """Names where there are any; otherwise kernels, by what they read. What is dearest per byte comes first."""
    found = dict.fromkeys(kind for item in forwards for kind in item.kind_of.values() if kind)
    names = [kind for kind in found if kind[0] == "name"]
    return names or list(found)


def frontier(forwards: Sequence[Forward], kinds: Sequence[Kind], host_bytes_per_ns: float | None) -> list[PolicyChoice]:
    """Choices of which none has both fewer bytes and less time than another, leanest first."""
    states = (KeptAt.REMAT, KeptAt.DEVICE) if host_bytes_per_ns is None else tuple(KeptAt)
    if len(states) ** len(kinds) <= MOST_TRIED:
        tried = [dict(zip(kinds, row, strict=True)) for row in itertools.product(states, repeat=len(kinds))]
    else:
        tried = list(_one_by_one(forwards, kinds, states, host_bytes_per_ns))
    found = sorted(
        (_choice(forwards, places, host_bytes_per_ns) for places in tried),
        key=lambda item: (item.saved_bytes, item.time_ns),
    )
    best: list[PolicyChoice] = []
    for choice in found:
        if not best or choice.time_ns < best[-1].time_ns:
            best.append(choice)
    return best


def _choice(forwards: Sequence[Forward], places: Mapping[Kind, KeptAt], rate: float | None) -> PolicyChoice:
    costs = [item.cost(places) for item in forwards]
    copied = sum(host for _, host, _ in costs)
    time = sum(again for _, _, again in costs) + (2 * copied / rate if rate else 0.0)
    return PolicyChoice(tuple(places.items()), sum(device for device, _, _ in costs), time)


def _one_by_one(
    forwards: Sequence[Forward], kinds: Sequence[Kind], states: Sequence[KeptAt], rate: float | None
) -> Iterator[dict[Kind, KeptAt]]:
    """From nothing saved on, each time the change that wins most time for its bytes."""
    places = dict.fromkeys(kinds, KeptAt.REMAT)
    now = _choice(forwards, places, rate)
    yield dict(places)
    while True:
        moves = [
            (_choice(forwards, {**places, kind: state}, rate), kind, state)
            for kind in kinds
            for state in states
            if state is not places[kind]
        ]
        gains = [
            ((now.time_ns - after.time_ns) / max(1, after.saved_bytes - now.saved_bytes), after, kind, state)
            for after, kind, state in moves
            if after.time_ns < now.time_ns
        ]
        if not gains:
            return
        _, now, kind, state = max(gains, key=lambda item: item[0])
        places[kind] = state
        yield dict(places)
