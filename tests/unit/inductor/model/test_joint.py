"""Joint graphs as Inductor hands them over, read without compiling."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

from tests.support.joints import uncut_of
from torch import nn

from remat.inductor.model.joint import Half, Joint, JointNode, Kind

WIDTH = 8


class Updating(nn.Module):
    """Writes to a buffer, which Inductor does in the graph, and to an argument of autograd, which is done after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](x)
        shifted = (hidden - self.mean).exp()
        self.mean.add_(shifted.detach().mean(0))
        state.mul_(2)
        return (shifted * state.sin()).sum()


@pytest.fixture(scope="module")
def joint() -> Joint:
    state = torch.randn(4, WIDTH, requires_grad=True) * 1
    with warnings.catch_warnings():
        # Dynamo looks at the gradient of every argument, also where autograd keeps none.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        return uncut_of(Updating(), torch.randn(4, WIDTH), state).joint


def readers_of_inputs(joint: Joint, target: str) -> list[JointNode]:
    found = [node for node in joint.nodes if node.target == target]
    return [node for node in found if any(joint.nodes[read].kind is Kind.INPUT for read in node.reads)]


@pytest.mark.parametrize("target", ["aten.sub.Tensor", "aten.mul.Tensor"])
def test_what_reads_an_input_that_is_written_to_runs_once(joint: Joint, target: str) -> None:
    readers = readers_of_inputs(joint, target)
    assert readers
    assert not any(node.recomputable for node in readers if node.phase is Half.FORWARD)


def test_what_reads_no_such_input_may_run_again(joint: Joint) -> None:
    assert [node.recomputable for node in joint.nodes if node.target == "aten.exp.default"] == [True]


def test_nodes_know_their_module(joint: Joint) -> None:
    assert "layers.0" in {node.module for node in joint.nodes if node.kind is Kind.ALONE}
