from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from tests.support.graphs import captured_from
from tests.support.nets import Loss, Stack, batch
from torch import nn

from remat.core.problem import Costs
from remat.pytorch.costs.allocations import peak_of, watch
from remat.pytorch.device import storage_bytes
from remat.pytorch.graph.capture import BOUNDARY, Captured

WIDTH = 16


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x.view(-1, WIDTH))
        return hidden.t()[1:].unsqueeze(0).exp().sum()


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).exp().sum()


class Updated(nn.Module):
    """Reads a buffer and updates it afterwards: a second run of the reader would see the update."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = (self.linear(x) - self.mean).exp()
        self.mean.add_(shifted.detach().mean(0))
        return shifted.sum()


@pytest.fixture(scope="module")
def views() -> Captured:
    return captured_from(Views(), torch.randn(4, 2, WIDTH))


def test_views_own_nothing(views: Captured) -> None:
    targets = {op.target for op in views.graph.ops}
    assert not targets & {"aten.t.default", "aten.view.default", "aten.slice.Tensor", "aten.unsqueeze.default"}
    (linear,) = (node for node in views.joint.graph.nodes if "addmm" in str(node.target))
    looking = [node for node in views.joint.graph.nodes if views.base.get(node) == views.base[linear]]
    assert len(looking) > 1


def test_views_of_inputs_belong_to_no_value(views: Captured) -> None:
    inputs = set(views.inputs())
    looking = [node for node in views.joint.graph.nodes if inputs & set(node.all_input_nodes) and node in views.base]
    assert any(views.base[node] is None for node in looking)


def test_sizes_are_those_of_whole_storages(views: Captured) -> None:
    for size, node in zip(views.size_bytes, views.value_nodes, strict=True):
        if node is not None:
            assert size == node.meta["val"].untyped_storage().nbytes()


def test_boundary_parts_forward_from_backward(views: Captured) -> None:
    ops = views.graph.ops
    boundary = ops[views.boundary]
    assert boundary.name == BOUNDARY
    assert not boundary.recomputable
    assert not any(op.backward for op in ops[: views.boundary])
    assert all(op.backward for op in ops[views.boundary + 1 :])
    (loss,) = views.forward_outputs
    assert views.base[loss] in boundary.inputs
    assert boundary.outputs == tuple(views.base[node] for node in views.tangents())


def test_what_the_caller_holds_is_not_recomputed(views: Captured) -> None:
    (loss,) = views.forward_outputs
    producer = views.graph.producers()[views.base[loss]]
    assert not views.graph.ops[producer].recomputable


def test_batch_norm_is_recomputable_and_its_statistics_are_updated_inputs() -> None:
    captured = captured_from(Norm(), torch.randn(8, WIDTH))
    (norm,) = (op for op in captured.graph.ops if "batch_norm_legit" in op.target)
    assert norm.recomputable
    assert len(captured.mutated) == 3


def test_readers_of_an_updated_buffer_run_once() -> None:
    captured = captured_from(Updated(), torch.randn(8, WIDTH))
    (updated,) = captured.mutated
    readers = [op for op, node in zip(captured.graph.ops, captured.op_nodes, strict=True) if node in updated.users]
    assert readers
    assert not any(op.recomputable for op in readers)


def test_random_ops_are_marked() -> None:
    captured = captured_from(Loss(Stack(2, dropout=0.5)), batch())
    names = {captured.graph.ops[number].target for number in captured.random_ops}
    assert names == {"remat.dropout_mask.default"}
    assert len(captured.random_ops) == 2


def test_ops_know_their_module() -> None:
    captured = captured_from(Loss(Stack(2)), batch())
    modules = [op.module for op in captured.graph.ops if op.target == "aten.addmm.default"]
    assert modules == ["body.layers.0", "body.layers.1"]


def test_mixed_precision_norms_keep_precise_statistics() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH), nn.GroupNorm(2, WIDTH)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.bfloat16()
            layer, batch_, group = self.norms
            x = F.batch_norm(x, None, None, batch_.weight, batch_.bias, training=True)
            x = F.group_norm(x, 2, group.weight, group.bias)
            return F.layer_norm(x, (WIDTH,), layer.weight, layer.bias).float().sum()

    captured = captured_from(Mixed(), torch.randn(8, WIDTH))
    ops = [node for node in captured.joint.graph.nodes if "norm" in str(node.target)]
    forward, backward = ops[:3], ops[3:]
    for node in forward:
        assert [value.dtype for value in node.meta["val"][1:3]] == [torch.float32, torch.float32]
    for node in backward:
        dtypes = [item.meta["val"].dtype for item in node.all_input_nodes]
        # The gradient and the input are short, two statistics and the weight are not.
        assert dtypes.count(torch.float32) >= 3


@pytest.mark.filterwarnings("ignore:A profiler of yours is running")
def test_capturing_allocates_no_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(captured: Captured, progress: object = None, *, again: bool = False) -> Costs:
        count = len(captured.graph.ops)
        return Costs((1.0,) * count, (0,) * count, captured.size_bytes)

    monkeypatch.setattr("remat.pytorch.run.variants.profile", free)
    x = torch.randn(1 << 15, 32)
    _, events = watch(lambda: captured_from(Loss(Stack(4)), x), torch.device("cpu"))
    assert peak_of(events) < storage_bytes(x, torch.device("cpu")) / 4
