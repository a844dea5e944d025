"""What "1x" is taken to be is what plain eager needs, on models that tracing or fake tensors show otherwise."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.bench_plain import CLOSE, compare


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "zoo-unet",
        "transformers-deberta",  # gathers, whose gradients autograd fills in place
        pytest.param("transformers-opt", marks=pytest.mark.long),  # layers left out at random: several graphs
        pytest.param("transformers-swin", marks=pytest.mark.long),  # norms of turned tensors
        pytest.param("transformers-mobilenet", marks=pytest.mark.long),  # depthwise convolutions
        "transformers-mixtral",  # experts that are called otherwise under tracing
    ],
)
@pytest.mark.filterwarnings("ignore:Not planned, runs as before")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_one_x_is_what_plain_eager_needs(name: str) -> None:
    row = compare(name, torch.get_num_threads(), "tiny")
    assert abs(row.difference) <= CLOSE, row
