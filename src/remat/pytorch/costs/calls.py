"""Distinct calls of ops that were seen on fake tensors, to be run later on made-up data.

In: each call with its arguments and results. Out: nodes of a graph, which is what `profile` can measure. No tensor of
the step is kept: what a call was given is kept as shapes, strides and dtypes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from remat.pytorch._compat.fakes import FakeTensorMode
from remat.pytorch._compat.tensors import storage_address
from remat.pytorch._compat.trees import tree_leaves, tree_map
from remat.pytorch.costs.op_costs import call_key, makes_blocks_for_its_backward
from remat.pytorch.living_storages import LivingStorages
from remat.pytorch.reach import dense_parts


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


class Calls:
    """Distinct calls by key; see the module's docstring."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        """One for each op; empty where it is not tried."""
        self._calls: dict[str, _Call] = {}
        self._makers = LivingStorages[tuple[str, int]]()
        """Living storages that only a certain call can fill, by address: that call, and which of its results."""

    def add(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, is_moderate: bool) -> str:
        """Note a call; gives its key, which is empty where it will not be tried."""
        is_tried = is_moderate and result is not None and _is_dense((args, kwargs, result))
        key = call_key(op, args, kwargs) if is_tried else ""
        self.keys.append(key)
        if not key:
            return key
        if key not in self._calls:
            self._calls[key] = _Call(op, *(tree_map(self._described, item) for item in (args, kwargs, result)))
        if makes_blocks_for_its_backward(op):
            for place, tensor in enumerate(result):
                if isinstance(tensor, torch.Tensor):
                    self._makers.add(tensor, (key, place))
        return key

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
        address = storage_address(item)
        shape, stride = tuple(item.shape), item.stride()
        maker = None
        known = self._makers.get(item)
        if known is not None:
            key, place = known
            whole = self._calls[key].result[place]
            maker = (key, place) if (whole.shape, whole.stride) == (shape, stride) else None
        return _Tensor(shape, stride, item.dtype, item.device, address, maker)


def _is_dense(tree: Any) -> bool:
    return all(leaf.layout is torch.strided for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def touched_bytes(tree: Any) -> int:
    """Of all tensors in arguments and results."""
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return sum(part.numel() * part.element_size() for tensor in tensors for part in dense_parts(tensor))


def _described_in(value: Any) -> list[_Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, _Tensor)]
