"""One step seen from outside its graphs: which storages go in and out of them, and when each one dies.

In: what the session tells of its programs (inputs taken, outputs and gradients returned, tangents handed in). Out: the
`Passed` storages of the step, and which gradients go straight from one graph to another. Storages are followed by weak
references, so that looking changes nothing. One that dies while a program runs was held outside only until that
program started: the caller waits for it meanwhile.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from remat.core.graph import ValueId
from remat.pytorch._compat.tensors import storage_address
from remat.pytorch.device import storage_bytes
from remat.pytorch.graph.capture import Captured
from remat.pytorch.living_storages import LivingStorages
from remat.pytorch.run.compose import BEFORE, Passed


@dataclass(slots=True)
class _Followed:
    size_bytes: int
    born: int
    source: tuple[int, ValueId] | None
    is_resident: bool = False
    """Whether it was there before the step."""
    inputs: list[tuple[int, int]] = field(default_factory=list)
    held: int | None = None
    """None while it is in memory."""
    pointer: int = 0
    """Where its bytes are."""


class Observer:
    """Follows the storages of one step.

    `known` are addresses of what outlives the step; without them only what forwards return is followed. `given` are
    addresses and bytes of what the step was called with, None where nobody knows.
    """

    def __init__(
        self, device: torch.device, known: Iterable[int] | None = None, given: dict[int, int] | None = None
    ) -> None:
        self.programs: list[tuple[int, bool]] = []
        """(call, is backward) of what has run, in order."""
        self._device = device
        self._follows_all = known is not None
        self._known = frozenset(known or ())
        self._given = given
        self._alive = LivingStorages[_Followed](self._note_death)
        self._taken: set[int] = set()
        self._all: list[_Followed] = []

    def know_what_was_made(self, allocated: Container[int]) -> None:
        """What the caller handed to a later graph and did not allocate in the step was there before it."""
        for item in self._all:
            if item.source is None and item.pointer not in allocated:
                item.is_resident = True

    @property
    def input_bytes(self) -> int:
        """Inputs of graphs that were there before the step."""
        return sum(item.size_bytes for item in self._all if item.is_resident)

    @property
    def made_bytes(self) -> int:
        """Inputs of the first graph that the step made."""
        return sum(item.size_bytes for item in self._all if item.born == BEFORE and not item.is_resident)

    @property
    def given_bytes(self) -> int:
        """What the step was called with, besides inputs of graphs."""
        given = self._given or {}
        return sum(size for address, size in given.items() if address not in self._known | self._taken)

    def counts(self, address: int) -> bool:
        """Whether a storage is among what is known, given or taken by graphs."""
        return address in self._known or address in (self._given or ()) or address in self._taken

    def take_inputs(self, call: int, inputs: Sequence[Any]) -> None:
        """A forward starts."""
        for number, item in enumerate(inputs if self._follows_all else ()):
            if isinstance(item, torch.Tensor) and storage_address(item) not in self._known:
                followed = self._alive.get(item) or self._follow_input(item)
                followed.inputs.append((call, number))
                self._taken.add(storage_address(item))

    def _follow_input(self, tensor: torch.Tensor) -> _Followed:
        followed = self._follow(tensor, len(self.programs) - 1, None)
        # Where it is not known what was there before the step, an input is taken to have been.
        followed.is_resident = self._given is None or storage_address(tensor) in self._given
        return followed

    def note_outputs(self, call: int, captured: Captured, outputs: Sequence[Any], *, backward: bool = False) -> None:
        """A forward or backward has ended and returned these."""
        self.programs.append((call, backward))
        if backward and not self._follows_all:
            return
        nodes = captured.backward_outputs if backward else captured.forward_outputs
        for node, tensor in zip(nodes, outputs, strict=True):
            value = captured.base.get(node) if isinstance(node, Node) else None
            if value is not None and isinstance(tensor, torch.Tensor) and tensor not in self._alive:
                self._follow(tensor, len(self.programs) - 1, (call, value))

    def sources(self, tangents: Sequence[Any]) -> tuple[tuple[int, int, ValueId], ...]:
        """See `Call.passed_gradients`: incoming gradients that another graph returned."""
        given = ((number, item) for number, item in enumerate(tangents) if isinstance(item, torch.Tensor))
        found = ((number, self._alive.get(item)) for number, item in given)
        return tuple((number, *item.source) for number, item in found if item is not None and item.source is not None)

    def ordered_gaps(self, calls: int) -> int:
        """How many gaps followed programs in the order in which `compose` has them."""
        expected = [*((call, False) for call in range(calls)), *((call, True) for call in reversed(range(calls)))]
        pairs = list(zip(self.programs, expected, strict=False))
        return next((place for place, (ran, wanted) in enumerate(pairs) if ran != wanted), len(pairs))

    def passed(self, calls: int) -> Iterator[Passed]:
        """The storages that graphs or the caller made in this step; those that are still there live to its end."""
        gaps, end = self.ordered_gaps(calls), 2 * calls - 1
        for item in self._all:
            if not item.is_resident and item.born < gaps:
                held = end if item.held is None or item.held >= gaps else item.held
                yield Passed(item.size_bytes, item.born, held, item.source, tuple(item.inputs))

    def held(self, calls: int) -> dict[tuple[int, ValueId], int]:
        """The last gap in which each value that graphs returned was in memory."""
        return {item.source: item.held for item in self.passed(calls) if item.source is not None}

    def _follow(self, tensor: torch.Tensor, born: int, source: tuple[int, ValueId] | None) -> _Followed:
        followed = _Followed(storage_bytes(tensor, self._device), born, source)
        followed.pointer = int(tensor.untyped_storage().data_ptr())
        self._alive.add(tensor, followed)
        self._all.append(followed)
        return followed

    def _note_death(self, followed: _Followed) -> None:
        followed.held = len(self.programs) - 1
