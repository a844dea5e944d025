"""What collectives take: by the link that was stated, or that is usual on the device.

The usual model of rings: of n ranks, each sends what it has n - 1 times on to the next, so that an all-gather or a
reduce-scatter of `size` bytes takes (n - 1) / n * size / bandwidth and n - 1 times the latency, an all-reduce twice
that. Figures are of one direction between one rank and the next. Collectives inside a graph are not measured op by op:
the other ranks may know an op's cost already, and would not answer.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import distributed
from torch.fx import Node

from remat.pytorch.graph.nodes import tensors_in


@dataclass(frozen=True, slots=True)
class RankLink:
    bytes_per_s: float
    latency_s: float

    def gather_s(self, size_bytes: int, ranks: int) -> float:
        """An all-gather to, or a reduce-scatter from, `size_bytes` on every rank."""
        return (ranks - 1) * (size_bytes / ranks / self.bytes_per_s + self.latency_s)

    def send_s(self, size_bytes: int) -> float:
        """From one rank to another."""
        return size_bytes / self.bytes_per_s + self.latency_s

    def reduce_s(self, size_bytes: int, ranks: int) -> float:
        """An all-reduce of `size_bytes`."""
        return 2 * self.gather_s(size_bytes, ranks)


USUAL = {"cuda": RankLink(100e9, 10e-6), "cpu": RankLink(2e9, 50e-6)}
"""Between GPUs of one machine, and between processes of one machine over gloo."""
_stated: list[RankLink] = []


def state_link(link: RankLink | None) -> None:
    """Price collectives by this link from now on, or by the usual ones again."""
    _stated[:] = [link] if link is not None else []


def link_of(device: torch.device) -> RankLink:
    return _stated[0] if _stated else USUAL.get(device.type, USUAL["cuda"])


def collective_ns(node: Node, device: torch.device) -> float:
    """Of one op of torch's functional collectives; waiting for one is part of it."""
    name = str(node.target).partition(".")[2]
    link, ranks = link_of(device), _ranks(node)
    read = sum(_bytes(item.meta.get("val")) for item in node.all_input_nodes)
    if name.startswith("wait_tensor"):
        return 0.0
    if name.startswith(("all_gather", "reduce_scatter", "all_to_all")):
        return 1e9 * link.gather_s(max(read, _bytes(node.meta.get("val"))), ranks)
    return 1e9 * link.reduce_s(read, ranks)


def _bytes(value: Any) -> int:
    return sum(reduce(operator.mul, item.shape, 1) * item.element_size() for item in tensors_in(value))


def _ranks(node: Node) -> int:
    """Of the group that the op names, or of all."""
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    from remat.pytorch._compat.distributed import ranks_of_group

    names = [item for item in node.args if isinstance(item, str)]
    return ranks_of_group(names[-1]) if names else distributed.get_world_size()
