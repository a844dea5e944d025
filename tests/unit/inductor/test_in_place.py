"""What kernels write over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch._inductor.scheduler import BaseSchedulerNode

from remat.inductor._compat.kernels import writing_over_what_ends


class Read(NamedTuple):
    name: str


def node_of(kernel: list[str], *reads: str) -> Any:
    """A node of a kernel that computes these, which reads those in this order."""
    outputs = [SimpleNamespace(get_name=lambda name=name: name) for name in kernel]
    fused = SimpleNamespace(get_nodes=lambda: [SimpleNamespace(get_outputs=lambda: outputs)])
    return SimpleNamespace(
        read_writes=SimpleNamespace(reads=[Read(name) for name in reads]),
        scheduler=SimpleNamespace(get_fused_node=lambda node: fused),
    )


def test_what_a_kernel_makes_on_the_way_is_written_over_last(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def first_that_fits(self: Any) -> None:
        seen.extend(read.name for read in self.read_writes.reads)

    monkeypatch.setattr(BaseSchedulerNode, "decide_inplace_update", first_that_fits)
    node = node_of(["made_here", "result"], "made_here", "mm_1", "mm_2")
    with writing_over_what_ends():
        BaseSchedulerNode.decide_inplace_update(node)
    assert seen == ["mm_1", "mm_2", "made_here"]
    assert [read.name for read in node.read_writes.reads] == ["made_here", "mm_1", "mm_2"], "as it was"
    assert BaseSchedulerNode.decide_inplace_update is first_that_fits
