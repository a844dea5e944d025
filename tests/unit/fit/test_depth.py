"""Deep models from shallow traces: op by op what a trace of the deep model is."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from remat import zoo
from remat.fit.depth import TRACED, deepen
from remat.fit.levers import Precision
from remat.fit.tracing import trace_step


@pytest.mark.parametrize(
    ("name", "precision", "per_block"),
    [("gpt", Precision.FP32, False), ("gpt", Precision.BF16, True)],
)
def test_repeated_blocks_are_written_down_as_they_would_be_traced(
    name: str, precision: Precision, per_block: bool
) -> None:
    example = zoo.build(name, depth=6)
    options = dict(precision=precision, gpu="A100-40GB", per_block=per_block)
    whole = trace_step(example.model, example.args, example.kwargs, **options)
    short = trace_step(example.model, example.args, example.kwargs, layers=TRACED, **options)
    deep = deepen(short, 6)
    assert deep is not None
    for one, other in zip(deep.calls, whole.calls, strict=True):
        assert (one.target, one.module, one.reads, one.makes) == (other.target, other.module, other.reads, other.makes)
        assert sorted(one.holds) == sorted(other.holds)
    assert (deep.sizes, deep.gradients, deep.parameters) == (whole.sizes, whole.gradients, whole.parameters)


def test_networks_whose_blocks_differ_are_not_deepened() -> None:
    example = zoo.build("resnet18")
    assert deepen(trace_step(example.model, example.args, example.kwargs, gpu="A100-40GB"), 20) is None
