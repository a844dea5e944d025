"""Problems at sizes nobody captured equal a real capture to the byte; costs come from a table instead of a clock."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from remat import zoo
from remat.core.problem import Costs
from remat.errors import RematError
from remat.pytorch.explore.resize import resized, size_along
from remat.pytorch.explore.scaling import Scaling, capture_step, scale
from remat.pytorch.graph.capture import Captured
from remat.zoo import Example


def table(captured: Captured) -> Costs:
    """An op takes a nanosecond for each 100 bytes it makes, and an eighth of them as workspace."""
    made = [sum(captured.size_bytes[value] for value in op.outputs) for op in captured.graph.ops]
    return Costs(tuple(10 + size / 100 for size in made), tuple(size // 8 for size in made), captured.size_bytes)


def scaling(name: str, axis: str, sizes: tuple[int, ...], **others: float) -> Scaling:
    degree = {"batch": 1, "length": 2}[axis]
    return scale(lambda size: zoo.build(name, **{axis: size}, **others), sizes, degree=degree, measure=table)


@pytest.mark.parametrize(
    ("name", "axis", "sizes", "unseen", "others"),
    [
        ("gpt", "batch", (2, 3, 5), 23, {"depth": 1}),
        ("mlp", "batch", (4, 8, 13), 1001, {"depth": 2}),
        pytest.param("gpt", "length", (8, 16, 24, 33), 77, {"depth": 1}, marks=pytest.mark.long),
        pytest.param("unet", "batch", (2, 3, 5), 13, {"depth": 1}, marks=pytest.mark.long),
        pytest.param("resnet18", "batch", (2, 3, 5), 13, {}, marks=pytest.mark.long),
    ],
)
def test_unseen_size_equals_a_real_capture_to_the_byte(
    name: str, axis: str, sizes: tuple[int, ...], unseen: int, others: dict[str, float]
) -> None:
    found = scaling(name, axis, sizes, **others)
    assert found.reason == ""
    real = capture_step(zoo.build(name, **{axis: unseen}, **others))
    costs = table(real.captured)
    predicted = found.at(unseen)
    assert predicted.problem.graph.ops == real.problem(costs).graph.ops
    assert predicted.problem.costs.size_bytes == costs.size_bytes
    assert predicted.problem.costs.workspace_bytes == pytest.approx(costs.workspace_bytes, abs=1)
    assert predicted.problem.resident_bytes == real.resident_bytes
    assert predicted.plain_peak_bytes == pytest.approx(real.plain_peak_bytes(), rel=0.001)
    assert predicted.problem.base_time_ns == pytest.approx(sum(costs.time_ns), rel=1e-6)
    assert predicted.time_error < 1e-6


class Changing(nn.Module):
    """Does something else where the batch is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        return (hidden.tanh() if len(x) > 6 else hidden).sum()


def changing(size: int) -> Example:
    return Example(Changing(), (torch.zeros(size, 8),))


def test_structure_that_changes_is_captured_at_each_size_and_says_so() -> None:
    found = scale(changing, (4, 6, 9), measure=table)
    assert found.law is None
    assert found.reason == "the graphs captured at 4 and 9 are not the same"
    small, large = found.at(5), found.at(20)
    assert len(large.problem.graph.ops) > len(small.problem.graph.ops)
    assert set(found.seen) == {4, 5, 6, 9, 20}


def test_size_one_is_captured_itself() -> None:
    found = scaling("mlp", "batch", (4, 8, 13), depth=1)
    assert found.law is not None
    found.at(2)
    assert 2 not in found.seen
    found.at(1)
    assert 1 in found.seen


def test_batch_is_repeated_or_cut_and_other_tensors_stay() -> None:
    example = Example(
        nn.Identity(), (torch.arange(6).view(3, 2), [torch.ones(3)]), {"mask": torch.ones(4), "flag": True}
    )
    larger, smaller = resized(example, "batch", 5), resized(example, "batch", 2)
    assert larger.args[0].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert (len(larger.args[1][0]), len(larger.kwargs["mask"]), larger.kwargs["flag"]) == (5, 4, True)
    assert smaller.args[0].tolist() == [[0, 1], [2, 3]]
    assert resized(example, "length", 3).args[0].tolist() == [[0, 1, 0], [2, 3, 2], [4, 5, 4]]
    assert (size_along(example, "batch"), size_along(example, "length")) == (3, 2)


def test_step_without_tensors_has_no_batch() -> None:
    with pytest.raises(RematError, match="no batch to change"):
        size_along(Example(nn.Identity(), (3,)), "batch")
