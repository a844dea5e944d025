"""Which experiments are run: sizes by device, batches as asked, unknown models refused."""

from __future__ import annotations

import pytest

from remat.bench.suite import EFFORT, MODELS, QUICK, make_suite
from remat.errors import UnknownName


def test_cuda_has_the_sizes_of_papers_in_half_precision() -> None:
    resnet, gpt = make_suite(MODELS, (), "cuda", quick=False).subjects
    assert (resnet.sizes["side"], resnet.sizes["width"], resnet.sizes["shrink"]) == (224, 64, 4)
    assert (gpt.sizes["depth"], gpt.sizes["width"], gpt.sizes["length"]) == (24, 1024, 1024)
    assert {resnet.precision, gpt.precision} == {"bf16"}


def test_quick_tries_less_at_smaller_batches() -> None:
    whole, quick = (make_suite(MODELS, (), "cpu", quick=flag) for flag in (False, True))
    assert (whole.effort, quick.effort) == (EFFORT, QUICK)
    for one, other in zip(whole.subjects, quick.subjects, strict=True):
        assert max(other.batches) < max(one.batches)
        assert len(other.batches) > 1


def test_largest_batches_come_first_of_every_model() -> None:
    tasks = make_suite(["gpt", "mlp"], (2, 8, 4), "cpu", quick=True).tasks()
    assert [(subjects.model, batch) for subjects, batch in tasks] == [
        (model, batch) for batch in (8, 4, 2) for model in ("gpt", "mlp")
    ]


def test_batches_are_sorted_and_taken_once() -> None:
    assert make_suite(["mlp", "mlp"], (16, 4, 16), "cpu", quick=False).subjects[0].batches == (4, 16)


@pytest.mark.parametrize("models", [["alexnet"], []])
def test_unknown_model_is_refused_with_those_there_are(models: list[str]) -> None:
    with pytest.raises(UnknownName, match="the zoo has gpt"):
        make_suite(models, (), "cpu", quick=False)
