"""Time and memory of ops that were followed on fake tensors.

`FakeClock` is told of every op and `FakeLedger` of every storage. Times are the roofline's. Workspace, which fake
tensors do not show, is what CUDA's kernels are known to need, for a device that is not here. On this machine's own
device, the distinct ops that could set the peak run on made-up data, as they do for a plan, and are kept in the cost
cache.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from remat.core.devices import Device
from remat.core.profile import BEFORE
from remat.pytorch._compat import FakeTensorMode, tree_leaves, tree_map
from remat.pytorch.cuda_rules import workspace_bytes
from remat.pytorch.ledger import Account, Seen, Span, StorageLedger
from remat.pytorch.profile import call_key, costs_of, makes_blocks_for_its_backward
from remat.pytorch.roofline import call_ns

LARGEST_TRIAL_BYTES = 1 << 30
LONGEST_TRIAL_NS = 1e9
"""Ops that touch more, or should take longer, are not tried."""
LARGEST_WORKSPACE = 2
"""How many times what an op reads and writes its workspace may be: sets which ops could lift the peak."""


class FakeClock:
    """Times by roofline, workspace by rule."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._times: list[float] = []
        self._workspaces: list[int] = []

    def begin(self) -> None:
        pass

    def end(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._times.append(call_ns(self._device, op, args, kwargs, result))
        self._workspaces.append(workspace_bytes(op, args))

    def times_ns(self) -> list[float]:
        return self._times

    def workspaces(self, live_bytes: Sequence[int]) -> list[int]:
        """One for each op, given what is in memory besides."""
        return self._workspaces


class OwnClock(FakeClock):
    """Times by roofline, workspace by trial on the device in use."""

    def __init__(self, device: Device, own: torch.device) -> None:
        super().__init__(device)
        self._own = own
        self._calls = _Calls()
        self._touched: list[int] = []

    def end(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        super().end(op, args, kwargs, result)
        touched = sum(leaf.nbytes for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor))
        self._touched.append(touched)
        is_moderate = touched <= LARGEST_TRIAL_BYTES and self._times[-1] <= LONGEST_TRIAL_NS
        self._calls.add(op, args, kwargs, result, is_moderate)

    def workspaces(self, live_bytes: Sequence[int]) -> list[int]:
        peak = max(live_bytes, default=0)
        rows = zip(self._calls.keys, live_bytes, self._touched, strict=True)
        keys = [key if live + LARGEST_WORKSPACE * touched >= peak else "" for key, live, touched in rows]
        known = costs_of(self._calls.nodes(key for key in keys if key), self._own)
        return [known[key].workspace_bytes if key else 0 for key in keys]


class FakeLedger(StorageLedger):
    """Sizes as the target's allocator hands them out, and what its matrix library holds."""

    def __init__(self, device: torch.device, clock: FakeClock, grain_bytes: int, held_bytes: int) -> None:
        super().__init__(device)
        self._clock, self._grain, self._held = clock, grain_bytes, held_bytes

    def size_of(self, tensor: torch.Tensor) -> int:
        return -(-super().size_of(tensor) // self._grain) * self._grain

    def account(self, seen: Sequence[Seen], op_count: int) -> Account:
        found = super().account(seen, op_count)
        return replace(
            found,
            start_bytes=found.start_bytes + self._held,
            live_bytes=[level + self._held for level in found.live_bytes],
            workspace_bytes=self._clock.workspaces([level + self._held for level in found.live_bytes]),
            others=[Span(self._held, BEFORE, op_count)] if self._held else [],
        )


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What a tensor is like; it is kept in the tensor's place, so that the tensor can die."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    address: int
    maker: tuple[str, int] | None = None
    """The call that alone can fill it, and which of its results it is."""

    def made(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class _Call:
    op: Any
    args: Any
    kwargs: Any
    result: Any


class _Calls:
    """Distinct calls, to be run later; no tensor of the step is kept."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        """One for each op; empty where it is not tried."""
        self._calls: dict[str, _Call] = {}
        self._makers: dict[int, tuple[str, int, weakref.ref[Any]]] = {}
        """Living storages that only a certain call can fill, by address: that call, and which of its results."""

    def add(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, is_moderate: bool) -> None:
        key = call_key(op, args, kwargs) if is_moderate and result is not None else ""
        self.keys.append(key)
        if not key:
            return
        if key not in self._calls:
            self._calls[key] = _Call(op, *(tree_map(self._described, item) for item in (args, kwargs, result)))
        if makes_blocks_for_its_backward(op):
            for place, tensor in enumerate(result):
                if isinstance(tensor, torch.Tensor):
                    self._remember(tensor, key, place)

    def nodes(self, keys: Iterable[str]) -> dict[str, Node]:
        """The calls as nodes of a graph, which is what can be measured."""
        graph = Graph()
        made: dict[str, Node] = {}
        with FakeTensorMode():
            return {key: self._node(key, graph, made) for key in dict.fromkeys(keys)}

    def _node(self, key: str, graph: Graph, made: dict[str, Node]) -> Node:
        if key in made:
            return made[key]

        def input_node(item: Any) -> Any:
            if not isinstance(item, _Tensor):
                return item
            if item.maker is not None:
                maker, place = item.maker
                node = graph.call_function(operator.getitem, (self._node(maker, graph, made), place))
            else:
                node = graph.placeholder(f"tensor_{len(graph.nodes)}")
            node.meta["val"] = item.made()
            return node

        call = self._calls[key]
        node = graph.call_function(call.op, tree_map(input_node, call.args), tree_map(input_node, call.kwargs))
        there = {item.address for item in _described_in((call.args, call.kwargs))}
        new = {item.address: item for item in _described_in(call.result) if item.address not in there}
        node.meta["val"] = [item.made() for item in new.values()]
        made[key] = node
        return node

    def _described(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        address = int(item.untyped_storage()._cdata)
        shape, stride = tuple(item.shape), item.stride()
        maker = None
        if address in self._makers:
            key, place, _ = self._makers[address]
            whole = self._calls[key].result[place]
            maker = (key, place) if (whole.shape, whole.stride) == (shape, stride) else None
        return _Tensor(shape, stride, item.dtype, item.device, address, maker)

    def _remember(self, tensor: torch.Tensor, key: str, place: int) -> None:
        storage = tensor.untyped_storage()
        address = int(storage._cdata)
        ref = weakref.ref(storage, lambda _: self._makers.pop(address, None))
        self._makers[address] = (key, place, ref)


def _described_in(value: Any) -> list[_Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, _Tensor)]
