"""Joint graphs as Inductor hands them over, read without compiling."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

from tests.support.joints import uncut_of
from torch import nn

from remat.inductor.loss.chunked import chunked_linear_cross_entropy
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


class Padding(nn.Module):
    """As products are padded whose sizes a GPU does not like: what comes from a softmax, and a weight's cast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = nn.functional.pad((x @ self.first).softmax(-1), (0, 3))
        weight = nn.functional.pad(self.second.bfloat16().float(), (0, 0, 0, 3))
        return (scores @ weight).sum()


def test_what_is_padded_is_in_memory_where_rows_were_summed_up_for_it() -> None:
    nodes = uncut_of(Padding(), torch.randn(4, WIDTH)).joint.nodes
    padded = [node for node in nodes if "constant_pad_nd" in node.target and node.phase is Half.FORWARD]
    assert sorted((node.elements, node.reads_memory) for node in padded) == [
        (4 * (WIDTH + 3), True),
        ((WIDTH + 3) * WIDTH, False),
    ]


class TiedLoss(nn.Module):
    """A loss in chunks, whose gradients are added up in room that is made before the first chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return chunked_linear_cross_entropy(x, self.weight, None, labels, chunks=2)


def test_room_for_results_is_in_memory_before_they_are() -> None:
    x, labels = torch.randn(6, WIDTH, requires_grad=True), torch.randint(WIDTH, (6,))
    joint = uncut_of(TiedLoss(), x, labels).joint
    rooms = [node.size_bytes for node in joint.nodes if node.target == "aten.empty.memory_format"]
    assert sorted(rooms) == [6 * WIDTH * 4, WIDTH * WIDTH * 4]


def test_rows_that_an_op_aligns_take_the_room_between_them_too() -> None:
    def made(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, (16, 1), dtype=x.dtype, device=x.device)

    @torch.library.custom_op("remat_tests::aligned", mutates_args=())
    def aligned(x: torch.Tensor) -> torch.Tensor:
        return made(x).copy_(x)

    aligned.register_fake(made)
    aligned.register_autograd(lambda ctx, gradient: gradient)

    class Aligning(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return aligned(x.exp()).exp().sum()

    found = uncut_of(Aligning(), torch.randn(4, 9, requires_grad=True)).joint
    (node,) = [node for node in found.nodes if node.target == "remat_tests.aligned.default"]
    assert node.size_bytes == 4 * (3 * 16 + 9)
