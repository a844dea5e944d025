"""The state model against real steps: bytes of a rank as they are when the step really runs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import remat
from remat import zoo
from remat.core.schedule import plain_schedule
from remat.core.simulate import simulate
from remat.fit.apply import make_optimizer_of, set_up
from remat.fit.levers import Levers, OptimizerKind, Precision, Recomputation, Zero
from remat.fit.state import rank_problem, state_of, update_peak
from remat.fit.tracing import trace_step

GPT: dict[str, Any] = dict(width=64, depth=5, heads=2, length=32, vocabulary=128, dropout=0.0)
NO_MASTERS = OptimizerKind.ADAMW_WITHOUT_MASTERS


def predicted_peak(name: str, sizes: dict[str, Any], levers: Levers) -> int:
    example = zoo.build(name, **sizes, batch=levers.micro_batch)
    per_block = levers.recomputation is Recomputation.PER_BLOCK
    trace = trace_step(example.model, example.args, example.kwargs, precision=levers.precision, per_block=per_block)
    state = state_of(trace, levers)
    problem = rank_problem(trace, levers, state)
    peak = simulate(problem, plain_schedule(problem.graph)).peak_bytes
    return max(peak, update_peak(trace, levers, state))


def real_peak(name: str, sizes: dict[str, Any], levers: Levers) -> int:
    example = zoo.build(name, **{**sizes, "batch": levers.micro_batch * levers.accumulation})
    made = set_up(example.model, make_optimizer_of(levers.optimizer, example.model), levers)
    args = example.args
    del example
    for _ in range(2):
        made.train_step(*args)
    return remat.measure(made.train_step, *args).peak_bytes


@pytest.mark.parametrize(
    "levers",
    [
        Levers(micro_batch=8),
        Levers(micro_batch=8, optimizer=OptimizerKind.SGD, accumulation=2),
        Levers(micro_batch=8, precision=Precision.BF16, optimizer=OptimizerKind.MOMENTUM),
        Levers(micro_batch=8, precision=Precision.BF16, recomputation=Recomputation.PER_BLOCK),
        Levers(micro_batch=8, precision=Precision.PURE_BF16, optimizer=NO_MASTERS),
        Levers(micro_batch=2, optimizer=OptimizerKind.ADAMW, recomputation=Recomputation.PER_BLOCK, accumulation=2),
    ],
    ids=lambda levers: levers.label,
)
def test_predicts_the_peak_of_a_real_step(levers: Levers) -> None:
    assert predicted_peak("gpt", GPT, levers) == pytest.approx(real_peak("gpt", GPT, levers), rel=0.02)


def test_optimizer_state_is_as_large_as_torch_makes_it() -> None:
    example = zoo.build("mlp")
    trace = trace_step(example.model, example.args, example.kwargs)
    for kind in (OptimizerKind.SGD, OptimizerKind.MOMENTUM, OptimizerKind.ADAMW):
        optimizer = make_optimizer_of(kind, example.model)
        example.model(*example.args).backward()
        optimizer.step()
        real = sum(
            item.nbytes for state in optimizer.state.values() for item in state.values() if hasattr(item, "nbytes")
        )
        assert state_of(trace, Levers(optimizer=kind)).optimizer_state == real


def weights(precision: Precision) -> Any:
    example = zoo.build("mlp", batch=2)
    return trace_step(example.model, example.args, example.kwargs, precision=precision, gpu="A100-40GB")


def test_textbook_bytes_of_each_stage() -> None:
    """bf16 weights and gradients with fp32 masters and moments: 2 + 2 + 12 bytes for each number, shared out."""
    trace = weights(Precision.PURE_BF16)
    count = sum(item.count for item in trace.parameters)
    levers = Levers(precision=Precision.PURE_BF16, accumulation=2)
    alone = state_of(trace, levers)
    assert alone.parameters == pytest.approx(2 * count, rel=0.05)
    assert alone.gradients == pytest.approx(2 * count, rel=0.05)
    assert alone.masters + alone.optimizer_state == pytest.approx(12 * count, rel=0.1)
    away = state_of(trace, Levers(precision=Precision.PURE_BF16, offloads_optimizer=True))
    assert (away.masters, away.optimizer_state) == (0, 0)
    assert away.host == alone.masters + alone.optimizer_state
    sharded = state_of(trace, Levers(precision=Precision.PURE_BF16, world=4, zero=Zero.WEIGHTS))
    assert sharded.parameters == pytest.approx(4 * count / 4, rel=0.1)
    assert sharded.masters == 0, "the shards are the masters"


def test_every_stage_holds_less_than_the_one_before() -> None:
    trace = weights(Precision.FP32)
    held = [state_of(trace, Levers(world=8, zero=zero)).resident_bytes for zero in Zero]
    assert held[0] > held[1] > held[2] >= held[3]
