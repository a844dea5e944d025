"""Memory of real ranks over gloo, in the order and size that was predicted; `benchmarks/bench_fit.py` has more."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.fit_ranks import measured_peaks

from remat import zoo
from remat.fit.cluster import find_cluster
from remat.fit.levers import Levers, Precision, Recomputation, Zero
from remat.fit.outcomes import Evaluator, Traces

SIZES: dict[str, Any] = dict(width=64, depth=3, heads=2, length=16, vocabulary=64, dropout=0.0)
PLAIN = Levers(world=2, micro_batch=4)
CHOSEN = [
    PLAIN,
    replace(PLAIN, zero=Zero.GRADIENTS),
    replace(PLAIN, zero=Zero.WEIGHTS, precision=Precision.PURE_BF16, recomputation=Recomputation.PER_BLOCK),
]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32" or not torch.distributed.is_available(), reason="needs gloo")
def test_ranks_hold_what_was_predicted() -> None:
    example = zoo.build("gpt", **SIZES, batch=PLAIN.micro_batch)
    evaluator = Evaluator(Traces(example.model, example.args, example.kwargs, None), find_cluster("cpu", 2))
    predicted = [evaluator.at_once(levers).peak_bytes for levers in CHOSEN]
    measured = measured_peaks("gpt", SIZES, CHOSEN, 2)
    assert sorted(predicted, reverse=True) == predicted
    assert predicted == pytest.approx(measured, rel=0.05)
