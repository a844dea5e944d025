"""What torch's own cut saves: told by nodes, not by names, which torch gives away again, and without making halves."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from tests.support.joints import uncut_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import remat
from remat.inductor import partition
from remat.inductor._compat.compiling import min_cut, replaying_only
from remat.inductor.model.joint import Kind
from remat.inductor.partition import Uncut, _put_before_readers, mark
from remat.pytorch.graph.nodes import draws


class Composed(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class NoiseInRegion(nn.Module):
    """Torch adds a node to its forward for the generator's state, by the first name that is free there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(8, 8, 3, padding=1)
        self.second = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return (checkpoint(lambda h: F.dropout(F.gelu(self.second(h)), 0.2), h, use_reentrant=False) + h).sum()


def test_node_that_torch_adds_for_random_ops_is_not_taken_for_one_of_backward() -> None:
    model = NoiseInRegion()
    step = remat.optimize(model, budget="64MiB", compiler="inductor")
    with warnings.catch_warnings(), inductor_config.patch(fallback_random=True):
        warnings.filterwarnings("error", "A graph of .* is not planned")
        for _ in range(2):
            step(torch.randn(4, 8, 32, requires_grad=True)).backward()
    assert remat.plan_of(step) is not None


def saved_by_whole_cut(uncut: Uncut) -> frozenset[int]:
    """The naive way: have both halves made, and see what the forward returns."""
    module = GraphModule(uncut.module, copy.deepcopy(uncut.module.graph))
    numbers = {node.name: number for number, node in enumerate(uncut.joint.nodes)}
    for node in module.graph.nodes:
        node.meta["number"] = numbers.get(node.name)
    forward, _ = min_cut(module, uncut.inputs, **uncut.options)
    outputs = forward.graph.output_node().args[0][uncut.options["num_fwd_outputs"] :]
    found = {item.meta.get("number") for item in outputs if isinstance(item, Node)} - {None}
    return frozenset(number for number in found if uncut.joint.nodes[number].kind is not Kind.INPUT)


def attention(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x.tanh(), x.sigmoid())


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 16)), (8, 16)),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)), (2, 3, 16, 16)),
        (Composed(attention), (2, 4, 8, 16)),
        (Composed(lambda x: x.exp()), (4, 4)),
    ],
    ids=["layers", "images", "attention", "nothing to run again"],
)
def test_what_torch_saves_is_known_without_its_halves(model: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    # Before the loss, so that backward is given a gradient of its size.
    uncut = uncut_of(model, torch.randn(shape, requires_grad=True))
    nodes = [node.name for node in uncut.module.graph.nodes]
    assert uncut.saved_by_torch() == saved_by_whole_cut(uncut)
    assert [node.name for node in uncut.module.graph.nodes] == nodes


def test_attention_that_drops_nothing_runs_again_as_it_is() -> None:
    """torch would wrap it, to give back a generator's state that it does not read; Inductor then lays out copies."""

    def step(x: torch.Tensor) -> torch.Tensor:
        mixed = F.scaled_dot_product_attention(x * 2, x.tanh(), x.sigmoid())
        return (mixed * mixed.sin()).sum()

    def attention_in_halves(draws: Callable[[Node], bool]) -> list[list[str]]:
        uncut = uncut_of(Composed(step), torch.randn(2, 4, 8, 16, requires_grad=True))
        mark(uncut.joint, uncut.nodes, frozenset())
        values = (node.meta.get("val") for node in uncut.nodes)
        mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
        with torch._guards.tracing(torch._guards.TracingContext(mode)), replaying_only(draws):
            halves = min_cut(uncut.module, uncut.inputs, **uncut.options)
        return [[str(node.target) for node in half.graph.nodes if _is_of_attention(node)] for half in halves]

    op = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert attention_in_halves(draws) == [[f"{op}.default"], [f"{op}.default", f"{op}_backward.default"]]
    assert any("rng_state" in name for half in attention_in_halves(lambda node: True) for name in half)


def _is_of_attention(node: Node) -> bool:
    return node.op == "call_function" and any(word in str(node.target) for word in ("attention", "rng_state"))


def test_what_runs_once_more_stands_right_before_its_first_reader() -> None:
    """Copies were put where the schedule first had them, which may be long before somebody reads them."""

    def step(x: torch.Tensor) -> torch.Tensor:
        again = x * 2
        twice = again * 3
        other = (x + 1).sin()
        return (other + twice) * again

    module = make_fx(step)(torch.randn(4))
    nodes = {node.name: node for node in module.graph.nodes}
    copies = [nodes["mul"], nodes["mul_1"]]
    _put_before_readers(copies, module)
    module.graph.lint()
    order = [node.name for node in module.graph.nodes if node.op == "call_function"]
    assert order == ["add", "sin", "mul", "mul_1", "add_1", "mul_2"]


def test_copies_that_nobody_reads_hold_nobody_early() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        again = x * 2
        torch.tan(again)
        return (x + 1).sin() * again

    module = make_fx(step)(torch.randn(4))
    copies = [node for node in module.graph.nodes if node.name in ("mul", "tan")]
    _put_before_readers(copies, module)
    module.graph.lint()
    order = [node.name for node in module.graph.nodes if node.op == "call_function"]
    assert order == ["add", "sin", "mul", "mul_1"]


def test_what_backward_reads_through_a_view_is_saved() -> None:
    """Torch forbids no view to run again, and would make again what it is a view of."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(x, -1).flatten()[::2].clone().unsqueeze(-1)
        return (x[:, :1].sin().repeat(2, 1) * weights).sum() + (weights * weights.detach().cos()).sum()

    uncut = uncut_of(Composed(rows), torch.randn(8, 4, requires_grad=True))
    found = {number for number, node in enumerate(uncut.joint.nodes) if node.name == "clone"}
    assert found
    mark(uncut.joint, uncut.nodes, frozenset(found))
    forward, _ = min_cut(uncut.module, uncut.inputs, **uncut.options)
    saved = forward.graph.output_node().args[0][uncut.options["num_fwd_outputs"] :]
    assert {node.name for node in saved} & {"clone", "unsqueeze"}


def test_another_version_is_not_given_code_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "__file__", str(tmp_path / "partition.py"))
    keys = []
    for text in ("as it is", "changed", "as it is"):
        (tmp_path / "joining.py").write_text(text)
        partition._sources.cache_clear()
        keys.append(partition.Partitioner(lambda uncut: partition.Instead.NOTHING).uuid())
    partition._sources.cache_clear()
    assert keys[0] == keys[2] != keys[1]
