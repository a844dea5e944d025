"""The computation of one training step: what is computed from what.

Ops stand in the order in which they are first computed. A *value* is one storage: views, aliases and
in-place results share the value they look at. Parameters, buffers and inputs are not values: they are
resident for the whole step and no schedule can change that, so ops do not list them as inputs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from remat.errors import InvalidGraph

OpId = NewType("OpId", int)
ValueId = NewType("ValueId", int)


class Transfer(StrEnum):
    """What moves values between the device and the host, beside the ops that compute; see `core.copies`."""

    OUT = "out"
    """Begins to copy its input to the host. Its output, without bytes, is the copy under way."""
    GONE = "gone"
    """Waits until that copy is done, so that the value it also reads can be dropped. Its output, without bytes, is the
    copy on the host."""
    BACK = "back"
    """Begins to copy back. Its output is the value that left, which an op before it makes too: it is in memory from
    here on, and whoever reads it first waits until it has arrived."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operator: reads values, produces values, each of which has no other producer."""

    name: str
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    backward: bool = False
    recomputable: bool = True
    """False when a second run would not give the same bits or would have a second side effect."""
    target: str = ""
    """Which operator this is, as `aten.mm.default`; empty where only costs are known."""
    module: str = ""
    """Where the user's model computes it, as `layers.3.mlp`; empty where unknown."""
    overwrites: tuple[ValueId, ...] = ()
    """Inputs into whose storage the op can write its only output, the preferred first.

    It does so in a schedule where nothing reads that version of the input later: then the output takes no memory of
    its own while the op runs.
    """
    transfer: Transfer | None = None
    """Set for an op that computes nothing: schedules may leave it out."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Ops in first-computation order over `value_count` values; `outputs` live to the end of the step."""

    ops: tuple[Op, ...]
    value_count: int
    outputs: tuple[ValueId, ...]
    name: str = ""

    def __post_init__(self) -> None:
        _check(self)

    def producers(self) -> tuple[OpId, ...]:
        """The op that computes each value."""
        result = [OpId(-1)] * self.value_count
        for number, op in enumerate(self.ops):
            for value in op.outputs if op.transfer is not Transfer.BACK else ():
                result[value] = OpId(number)
        return tuple(result)

    def consumers(self) -> tuple[tuple[OpId, ...], ...]:
        """The ops that read each value, in order."""
        result: list[list[OpId]] = [[] for _ in range(self.value_count)]
        for number, op in enumerate(self.ops):
            for value in op.inputs:
                result[value].append(OpId(number))
        return tuple(map(tuple, result))


def _check_overwrites(graph: Graph, number: int, op: Op) -> None:
    if len(op.outputs) != 1 or not set(op.overwrites) <= set(op.inputs):
        raise InvalidGraph(
            f"Op {number} (`{op.name}`) overwrites what it cannot; only an op with one output can overwrite its inputs."
        )
    kept = set(op.overwrites) & set(graph.outputs)
    if kept:
        raise InvalidGraph(f"Op {number} (`{op.name}`) overwrites value {min(kept)}, an output; outputs must be kept.")


def _check_transfer(graph: Graph, number: int, op: Op) -> None:
    """Ops that move a value come last, three for each, in the order of `Transfer`."""
    before = graph.ops[number - 1].transfer if number else None
    follows = {Transfer.OUT: (None, Transfer.BACK), Transfer.GONE: (Transfer.OUT,), Transfer.BACK: (Transfer.GONE,)}
    is_in_order = before is None if op.transfer is None else before in follows[op.transfer]
    is_last = number == len(graph.ops) - 1
    if not is_in_order or (is_last and op.transfer in (Transfer.OUT, Transfer.GONE)):
        raise InvalidGraph(
            f"Op {number} (`{op.name}`) moves a value out of turn; list out, gone and back of each value after all ops."
        )


def _check(graph: Graph) -> None:
    produced: set[int] = set()
    for number, op in enumerate(graph.ops):
        if not produced.issuperset(op.inputs):
            missing = next(value for value in op.inputs if value not in produced)
            raise InvalidGraph(
                f"Op {number} (`{op.name}`) reads value {missing}, which no earlier op produces; "
                "list the ops in a topological order."
            )
        _check_transfer(graph, number, op)
        for value in op.outputs if op.transfer is not Transfer.BACK else ():
            if value in produced or not 0 <= value < graph.value_count:
                raise InvalidGraph(
                    f"Op {number} (`{op.name}`) produces value {value}, which is already produced or out of range; "
                    "give each value one producer."
                )
            produced.add(value)
        if len(op.inputs) > 1 and len(set(op.inputs)) != len(op.inputs):
            raise InvalidGraph(f"Op {number} (`{op.name}`) lists an input twice; list each value once.")
        if op.overwrites:
            _check_overwrites(graph, number, op)
    if len(produced) != graph.value_count:
        raise InvalidGraph(f"{graph.value_count - len(produced)} values have no producer; remove or produce them.")
    for value, count in Counter(graph.outputs).items():
        if value not in produced or count > 1:
            raise InvalidGraph(f"Output {value} is produced by no op or listed twice; list produced values once each.")
