"""A combination of levers: what makes no sense is refused in one sentence, the rest is described."""

from __future__ import annotations

import pytest

from remat.errors import RematError, UnknownName
from remat.fit.levers import (
    Levers,
    OptimizerKind,
    Precision,
    Recomputation,
    Zero,
    accumulation_for,
    read_allowed,
)


@pytest.mark.parametrize(
    ("levers", "words"),
    [
        (Levers(micro_batch=0), "micro_batch is 0"),
        (Levers(world=6, pipeline_stages=4), "6 ranks cannot be divided into 4 pipeline stages"),
        (Levers(recomputation=Recomputation.PLANNED), "came with the budget None"),
        (Levers(budget_bytes=5), "came with the budget 5"),
        (Levers(recomputation=Recomputation.PLANNED, budget_bytes=0), "budget is 0 bytes"),
        (Levers(offloads_activations=True), "Activations are offloaded by a plan"),
    ],
)
def test_refuses_what_makes_no_sense(levers: Levers, words: str) -> None:
    with pytest.raises(RematError, match=words):
        levers.check()


@pytest.mark.parametrize(
    ("levers", "words"),
    [
        (Levers(world=2, pipeline_stages=2), "predicted only"),
        (Levers(precision=Precision.PURE_BF16), "fp32 masters"),
        (Levers(world=2, zero=Zero.OPTIMIZER, offloads_optimizer=True), "cannot be offloaded"),
        (Levers(world=2, zero=Zero.GRADIENTS, offloads_optimizer=True), "use ZeRO-3"),
    ],
)
def test_names_what_cannot_be_set_up(levers: Levers, words: str) -> None:
    assert words in levers.check().obstacle
    assert not levers.is_runnable


def test_batch_is_of_the_whole_job() -> None:
    levers = Levers(micro_batch=4, accumulation=2, world=8, pipeline_stages=2).check()
    assert (levers.replicas, levers.batch) == (4, 32)


@pytest.mark.parametrize(("batch", "micro", "replicas"), [(10, 1, 4), (3, 1, 4), (16, 3, 4)])
def test_refuses_batches_that_do_not_divide(batch: int, micro: int, replicas: int) -> None:
    with pytest.raises(RematError, match="cannot be divided"):
        accumulation_for(batch, micro, replicas)


def test_divides_a_batch() -> None:
    assert accumulation_for(256, 8, 8) == 4


def test_masters_exist_beside_bf16_weights_alone() -> None:
    assert Levers(precision=Precision.PURE_BF16).has_masters
    assert not Levers(precision=Precision.BF16).has_masters
    assert not Levers(Precision.PURE_BF16, OptimizerKind.ADAMW_WITHOUT_MASTERS).has_masters


def test_names_of_levers_are_read() -> None:
    assert read_allowed("bf16, zero") == {"bf16", "zero"}
    with pytest.raises(UnknownName, match="known are fp16"):
        read_allowed("magic")
