"""What is scattered into zeros and added to another gradient is scattered into that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.joints import uncut_of
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from remat.inductor.passes.scatter import scatter_into_terms

aten = torch.ops.aten
ROWS, WIDTH, COUNT = 10, 4, 16


def whole(*shape: int) -> Tensor:
    """Whole numbers, whose sums are the same in any order."""
    return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


def scattered(values: Tensor, rows: Tensor, *, into: float = 0.0, is_added: bool = True) -> Tensor:
    return aten.index_put(aten.full([ROWS, WIDTH], into), [rows], values, is_added)


def rewritten(step: Callable[..., Tensor]) -> tuple[GraphModule, list[Tensor]]:
    rows = torch.randint(ROWS, (COUNT,), generator=torch.Generator().manual_seed(0))
    inputs = [whole(ROWS, WIDTH), whole(COUNT, WIDTH), rows]
    module = make_fx(step, tracing_mode="fake")(*inputs)
    scatter_into_terms(module)
    module.graph.lint()
    return module, inputs


def count(module: GraphModule, target: object) -> int:
    return len(module.graph.find_nodes(op="call_function", target=target))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_term_takes_in_what_is_scattered(is_first: bool) -> None:
    def step(other: Tensor, values: Tensor, rows: Tensor) -> Tensor:
        term, put = other * 2, scattered(values, rows)
        return (term + put if is_first else put + term) * 3

    module, inputs = rewritten(step)
    assert (count(module, aten.add.Tensor), count(module, aten.full.default)) == (0, 0)
    assert torch.equal(module(*inputs), step(*inputs))


def test_one_after_the_other() -> None:
    """A matrix that an encoder and a decoder look words up in, and that words are compared with."""

    def step(other: Tensor, values: Tensor, rows: Tensor) -> Tensor:
        first = other * 2 + scattered(values, rows)
        return first + scattered(values * 3, rows + 0)

    module, inputs = rewritten(step)
    assert (count(module, aten.add.Tensor), count(module, aten.full.default)) == (1, 0), "rows + 0 alone"
    assert torch.equal(module(*inputs), step(*inputs))


def later(other: Tensor, values: Tensor, rows: Tensor) -> Tensor:
    put = scattered(values, rows)
    return put + other * 2


def read_twice(other: Tensor, values: Tensor, rows: Tensor) -> Tensor:
    term, put = other * 2, scattered(values, rows)
    return (term + put) * put


def weighed(other: Tensor, values: Tensor, rows: Tensor) -> Tensor:
    term = other * 2
    return torch.add(term, scattered(values, rows), alpha=2)


def into_ones(other: Tensor, values: Tensor, rows: Tensor) -> Tensor:
    term = other * 2
    return term + scattered(values, rows, into=1.0)


def replaced(other: Tensor, values: Tensor, rows: Tensor) -> Tensor:
    term = other * 2
    return term + scattered(values, rows, is_added=False)


def wider(other: Tensor, values: Tensor, rows: Tensor) -> Tensor:
    term = (other * 2).double()
    return term + scattered(values, rows)


def grown(other: Tensor, values: Tensor, rows: Tensor) -> Tensor:
    term = other.sum(0)
    return term + scattered(values, rows)


@pytest.mark.parametrize("step", [later, read_twice, weighed, into_ones, replaced, wider, grown])
def test_what_is_something_else_stays(step: Callable[..., Tensor]) -> None:
    module, inputs = rewritten(step)
    assert count(module, aten.add.Tensor) == 1
    assert torch.equal(module(*inputs), step(*inputs))


def test_a_tied_matrix_has_one_gradient_in_memory() -> None:
    class Tied(nn.Module):
        """Words are looked up in the matrix that they are compared with."""

        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(50, 8)

        def forward(self, tokens: Tensor) -> Tensor:
            return (self.words(tokens) @ self.words.weight.T).square().mean()

    joint = uncut_of(Tied(), torch.randint(50, (4, 6))).joint
    large = [node for node in joint.nodes if node.elements == 50 * 8 and node.name in ("add", "full_default")]
    (scatter,) = [node for node in joint.nodes if "index_put" in node.target]
    assert not large
    assert scatter.owner in joint.gradients
