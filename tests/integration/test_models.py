"""The promise on real models: the same bits under every budget, the budget held, the peak predicted.

Each model is captured once for each precision; the budget then changes from run to run.
"""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.models import TRANSFORMERS, build_transformers
from tests.support.steps import differences, loss_of, record, snapshot, training_step

import remat
from remat import zoo
from remat.zoo import Example

BUDGETS = (0.8, 0.6, 0.5, 0.4)
FEWER_BUDGETS = (0.5,)
"""Where there is no time for all: see `--long`."""
ALWAYS_FEASIBLE = {0.8, 0.6, 0.5}
MODELS = (*(f"zoo-{name}" for name in zoo.REGISTRY), *(f"transformers-{name}" for name in TRANSFORMERS))
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
UNLIMITED = "50x"

AS_RESNET18 = "zoo-resnet50"
"""Of the same kinds of layers, and larger."""
IN_HALF = ("zoo-gpt", "zoo-lstm", "zoo-unet", "zoo-resnet18")
"""Attention, recurrence, convolutions, batch norm, ops that autocast leaves in fp32."""

WITH_OPTIMIZER = (
    *(("zoo-mlp", is_given) for is_given in (True, False)),
    *(("transformers-gpt2", is_given) for is_given in (True, False)),
    *((f"zoo-{name}", False) for name in ("gpt", "lstm", "resnet18")),
)
OTHERS_WITH_OPTIMIZER = tuple(
    (name, False)
    for name in (*MODELS[: len(zoo.REGISTRY)], "transformers-bert", "transformers-resnet")
    if (name, False) not in WITH_OPTIMIZER
)

EXACT = 0.001
RESERVED = 0.01
"""How much more than is needed may be taken to be: a kernel by itself can work in more than beside others."""


def build(name: str) -> Example:
    kind, _, short = name.partition("-")
    example = zoo.build(short) if kind == "zoo" else build_transformers(short)
    example.model.train()
    return example


def _covering(chosen, others):
    """Every case of `chosen`, and the rest of the product with --long."""
    return [*chosen, *(pytest.param(*case, marks=pytest.mark.long) for case in others)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    _covering(
        [*((name, "fp32") for name in MODELS if name != AS_RESNET18), *((name, "bf16") for name in IN_HALF)],
        [(AS_RESNET18, "fp32"), *((name, "bf16") for name in MODELS if name not in IN_HALF)],
    ),
)
@pytest.mark.filterwarnings("ignore:Not planned, runs as before")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_gives_same_bits_within_every_budget(name: str, precision: str, pytestconfig: pytest.Config) -> None:
    if precision in _emulated() and name in SLOW_EMULATED and not pytestconfig.getoption("--long"):
        pytest.skip("this machine emulates the precision, which takes minutes; run with --long")
    dtype, example = PRECISIONS[precision], build(name)
    buffers = snapshot(example.model)
    eager = _eager_record(example, buffers, dtype)
    plain_peak = remat.measure(training_step(example.model, example, dtype)).peak_bytes
    optimized = remat.optimize(example.model, UNLIMITED, time_limit=0.3)
    record(optimized, example, buffers, dtype)
    unplanned = record(optimized, example, buffers, dtype)

    assert differences(eager, unplanned) == []
    assert remat.plan_of(optimized).plain_peak_bytes == pytest.approx(plain_peak, rel=0.01)
    most_at_once = _most_at_once(optimized)

    shares = BUDGETS if pytestconfig.getoption("--long") else FEWER_BUDGETS
    feasible = [share for share in shares if _holds(optimized, example, buffers, dtype, unplanned, share)]
    # Where kernels of this machine work in much memory of their own, less can be saved.
    expected = {share for share in ALWAYS_FEASIBLE & set(shares) if share * plain_peak > most_at_once}
    assert precision in _emulated() or expected <= set(feasible)


SLOW_EMULATED = ("zoo-gpt", "zoo-resnet18", "zoo-unet", "transformers-whisper")


def _emulated() -> set[str]:
    """Precisions that this machine computes in another one, with copies that take memory of their own."""
    return set() if torch.ops.mkldnn._is_mkldnn_bf16_supported() else {"bf16"}


def _eager_record(example: Example, buffers, dtype):
    try:
        return record(example.model, example, buffers, dtype)
    except RuntimeError as error:
        pytest.skip(f"plain PyTorch cannot run it on this machine: {str(error)[:80]}")


def _most_at_once(optimized) -> int:
    """What no schedule can do without: one op with all that it reads, writes and works in, beside what is resident."""
    problem = remat.plan_of(optimized).problem
    return problem.resident_bytes + max(
        problem.costs.workspace_bytes[number]
        + sum(problem.costs.size_bytes[value] for value in {*op.inputs, *op.outputs})
        for number, op in enumerate(problem.graph.ops)
    )


def _holds(optimized, example, buffers, dtype, unplanned, share: float) -> bool:
    """Whether the budget is feasible; if it is, everything promised must hold."""
    remat.set_budget(optimized, f"{share}x")
    try:
        first = record(optimized, example, buffers, dtype)
    except remat.InfeasibleBudget as error:
        assert error.min_budget > share * 0.99 * remat.measure(training_step(example.model, example, dtype)).peak_bytes
        return False
    assert differences(unplanned, first) == [], f"first step at {share}x"
    assert differences(unplanned, record(optimized, example, buffers, dtype)) == [], f"second step at {share}x"
    plan = remat.plan_of(optimized)
    measured = remat.measure(training_step(optimized, example, dtype)).peak_bytes
    assert measured <= plan.budget_bytes, f"{share}x"
    assert plan.predicted_peak <= plan.budget_bytes, f"{share}x"
    assert measured * (1 - EXACT) <= plan.predicted_peak <= measured * (1 + RESERVED), f"{share}x"
    return True


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_given"), _covering(WITH_OPTIMIZER, OTHERS_WITH_OPTIMIZER))
def test_three_adamw_steps_give_equal_parameters(name: str, is_given: bool) -> None:
    """The optimizer is there before the first step; it is passed in, or found by Remat itself."""
    example = build(name)
    plain, trained = copy.deepcopy(example.model), example.model
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
    optimized = remat.optimize(trained, "0.6x", optimizer=optimizer if is_given else None, time_limit=0.5)

    expected = _train(plain, plain_optimizer, example)
    assert _train(optimized, optimizer, example) == expected
    for (place, parameter), other in zip(trained.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, other), place
    for (place, buffer), other in zip(trained.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, other), place

    state = [value for values in optimizer.state.values() for value in values.values()]
    plan = remat.plan_of(optimized)
    assert dict(plan.breakdown_bytes)["optimizer state"] == sum(value.untyped_storage().nbytes() for value in state)
    step = training_step(optimized, example)
    assert remat.measure(lambda: (step(), optimizer)).peak_bytes <= plan.budget_bytes


def _train(model, optimizer, example: Example) -> list[float]:
    torch.manual_seed(0)
    losses = []
    for _ in range(3):
        loss = loss_of(model(*example.args, **example.kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
