from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.support.graphs import real_inputs, trace
from tests.support.steps import same_bits
from torch import nn

from remat.pytorch.graph.capture import Captured, capture
from remat.pytorch.graph.specialize import drop_tangents, lay_out_again
from remat.pytorch.run.variants import TracedGraph


class TwoOutputs(nn.Module):
    """A loss, and features that it does not need all of."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x).tanh()
        return hidden.square().mean(), torch.dropout(self.head(hidden).exp(), 0.5, True)


@pytest.fixture(scope="module")
def graph() -> TracedGraph:
    return trace(TwoOutputs(), torch.randn(4, 8))


@pytest.fixture(scope="module")
def dropped(graph: TracedGraph) -> Captured:
    return capture(drop_tangents(graph.joint, {1}), graph.num_forward_outputs)


def _gradients(captured: Captured, tangents: list[torch.Tensor]) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    inputs = [*real_inputs(captured), *tangents]
    results = torch.fx.Interpreter(captured.joint).run(*inputs, enable_io_processing=False)
    return list(results[len(captured.forward_outputs) :])


def test_first_guess_is_that_only_the_loss_has_a_gradient(graph: TracedGraph) -> None:
    assert graph.absent == {1}


def test_absent_gradients_take_their_ops_with_them(graph: TracedGraph, dropped: Captured) -> None:
    assert len(dropped.graph.ops) < len(graph.full.graph.ops)
    assert dropped.tangents()[1].users == {}


def test_what_is_left_has_the_bits_of_zeros(graph: TracedGraph, dropped: Captured) -> None:
    loss, zeros = torch.ones(()), torch.zeros(4, 8)
    full = _gradients(graph.full, [loss, zeros])
    left = _gradients(dropped, [loss, zeros])
    for expected, found in zip(full, left, strict=True):
        if found is None:
            assert expected is None or not expected.any()
        else:
            assert same_bits(expected, found)
    assert sum(found is None for found in left) > sum(found is None for found in full)


def test_random_ops_of_an_unused_output_still_run(dropped: Captured) -> None:
    assert any(op.target == "remat.dropout_mask.default" for op in dropped.graph.ops)


def test_the_traced_graph_is_left_as_it_was(graph: TracedGraph) -> None:
    before = str(graph.joint.graph)
    drop_tangents(graph.joint, {0})
    assert str(graph.joint.graph) == before


def test_wrong_guess_is_not_made_again(graph: TracedGraph) -> None:
    fresh = TracedGraph(0, graph.joint, graph.num_forward_outputs, graph.plain, alone=True, breaks_off=False)
    fresh.saw(frozenset())
    assert fresh.absent == frozenset()
    fresh.saw(frozenset({1}))
    assert fresh.absent == frozenset()


def test_no_scalar_is_taken_for_a_loss_where_a_graph_breaks_off(graph: TracedGraph) -> None:
    broken = TracedGraph(0, graph.joint, graph.num_forward_outputs, graph.plain, alone=False, breaks_off=True)
    assert broken.absent == frozenset()


def test_values_keep_their_types_inside_the_users_autocast() -> None:
    """A graph's ops have been cast; planning may happen where the user casts."""
    captured = capture(trace(TwoOutputs(), torch.randn(4, 8)).joint, 2)
    nodes = [node for node in captured.joint.graph.nodes if node.op == "call_function"]
    types = [node.meta["val"].dtype for node in nodes]
    with torch.autocast("cpu", torch.bfloat16):
        lay_out_again(captured.joint.graph, set(captured.inputs()))
    assert [node.meta["val"].dtype for node in nodes] == types
