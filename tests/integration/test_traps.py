"""Everything that others fell into in public has a test of its own here."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from tests.support.collectives import Gather, one_rank
from tests.support.nets import WIDTH, Loss, Stack, batch, check_like_eager, recomputed_targets, seeded, stack
from tests.support.steps import differences, record, snapshot, training_step
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from remat.pytorch._compat.memory import profiler_is_running
from remat.pytorch.resident.optimizer_state import pending_state_bytes
from remat.zoo import Example

splits_graphs = pytest.mark.filterwarnings("ignore:Not planned, runs as before")
# Dynamo looks whether a tensor has a `.grad` and silences torch's complaint, but not where warnings are errors.
looks_for_gradients = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def test_recomputed_dropout_draws_the_same_mask() -> None:
    optimized = check_like_eager(stack(dropout=0.5), batch(), budget="1x", solver="full")
    assert "remat.dropout_mask.default" in recomputed_targets(optimized)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for projection in self.projections:
            query, key, value = projection(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(query, key, value, dropout_p=0.3)
            x = x + attended.transpose(1, 2).flatten(-2)
        return x


def test_recomputed_attention_with_dropout_inside_draws_the_same_mask() -> None:
    model = seeded(lambda: Loss(Attention()))
    optimized = check_like_eager(model, batch().unflatten(0, (8, 32)), budget="1x", solver="full")
    assert "remat.dropout_mask.default" in recomputed_targets(optimized)


def test_lower_budget_gives_lower_measured_peak() -> None:
    model = stack(depth=10)
    example = Example(model, (batch(),))
    optimized = remat.optimize(model, "1x", time_limit=1)
    peaks = []
    for share in (0.75, 0.7, 0.65, 0.6, 0.5, 0.4):
        remat.set_budget(optimized, f"{share}x")
        peaks.append(remat.measure(training_step(optimized, example)).peak_bytes)
        assert peaks[-1] <= remat.plan_of(optimized).budget_bytes
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


@pytest.mark.parametrize("solver", ["full", "sqrt_n", "auto"])
def test_long_recompute_chains_stay_within_the_peak_that_was_promised(solver: str) -> None:
    model = stack(depth=24, dropout=0.0)
    example = Example(model, (batch(),))
    budget = "1x" if solver != "auto" else "0.35x"
    optimized = remat.optimize(model, budget, solver=solver, time_limit=1)
    measured = remat.measure(training_step(optimized, example)).peak_bytes
    plan = remat.plan_of(optimized)
    assert plan.schedule.recomputed()
    assert measured == plan.predicted_peak <= plan.budget_bytes


def test_collectives_are_never_recomputed() -> None:
    # gloo's thread lets go of a collective's tensors a moment after its wait has returned. In a few steps of a hundred
    # it is late and a storage is seen alive one op longer; a plan that holds too much does so in every step.
    with one_rank():
        optimized = check_like_eager(seeded(lambda: Loss(Gather())), batch(), measured_steps=20)
    plan = remat.plan_of(optimized)
    assert plan.schedule.recomputed()
    assert plan.predicted_peak <= plan.budget_bytes
    found = [op for op in plan.problem.graph.ops if "c10d" in op.target]
    assert found
    assert not any(op.recomputable for op in found)


TWO_PROCESSES = """
import hashlib, torch, remat
from remat import zoo
example = zoo.build("mlp")
plan = remat.plan(example.model, *example.args, **example.kwargs, budget="0.6x", time_limit=20)
print(hashlib.sha256(repr((plan.schedule.steps, plan.fingerprint)).encode()).hexdigest())
"""


@pytest.mark.slow
def test_two_processes_make_the_same_plan() -> None:
    def run(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", TWO_PROCESSES]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert run("1") == run("2") != ""


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
    "adam amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "sgd momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_is_reserved_before_it_exists(name: str) -> None:
    model = stack(depth=3)
    optimizer = OPTIMIZERS[name](model.parameters())
    reserved = pending_state_bytes(optimizer, torch.device("cpu"))
    model(batch()).backward()
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    real = sum(value.untyped_storage().nbytes() for value in state if isinstance(value, torch.Tensor))
    assert reserved == real
    assert pending_state_bytes(optimizer, torch.device("cpu")) == 0


@pytest.mark.parametrize("is_given", [True, False])
def test_plan_made_at_step_one_holds_after_adam_has_its_state(is_given: bool) -> None:
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters())
    optimized = remat.optimize(model, "0.7x", optimizer=optimizer if is_given else None, time_limit=1)

    def forward_and_backward() -> None:
        assert optimizer.param_groups
        optimized(batch()).backward()
        optimizer.zero_grad()

    optimized(batch()).backward()
    plan = remat.plan_of(optimized)
    optimizer.step()
    optimizer.zero_grad()
    # The input is made inside the measured step, where the plan counts it too.
    assert remat.measure(forward_and_backward).peak_bytes == plan.predicted_peak <= plan.budget_bytes
    assert remat.plan_of(optimized) is plan


def test_autocast_weight_casts_give_the_same_bits() -> None:
    optimized = check_like_eager(stack(), batch(), dtype=torch.bfloat16)
    assert any("_to_copy" in op.target for op in remat.plan_of(optimized).problem.graph.ops)


class Routed(nn.Module):
    """Each row goes to one of two experts: how many, only the data tells."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Stack(3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(scores.argmax(-1) == number).squeeze(-1)
            result = result.index_add(0, rows, expert(x[rows]) * scores[rows, number, None])
        return result


def test_data_dependent_shapes_run_and_say_what_is_left_out() -> None:
    model = seeded(lambda: Loss(Routed()))
    example = Example(model, (batch(),))
    eager = record(model, example, {})
    optimized = remat.optimize(model, "0.8x", time_limit=1)
    with pytest.warns(UserWarning, match="runs as before|unplanned"):
        first = record(optimized, example, {})
    assert differences(eager, first) == []
    assert differences(eager, record(optimized, example, {})) == []


@splits_graphs
@looks_for_gradients
@pytest.mark.parametrize("budget", ["0.8x", "0.6x"])
def test_data_dependent_shapes_stay_within_the_budget(budget: str) -> None:
    model = seeded(lambda: Loss(Routed()))
    example = Example(model, (batch(),))
    optimized = remat.optimize(model, budget, time_limit=1)
    step = training_step(optimized, example)
    step()
    step()
    plan = remat.plan_of(optimized)
    assert plan.plain_peak_bytes == pytest.approx(remat.measure(training_step(model, example)).peak_bytes, rel=0.01)
    assert remat.measure(step).peak_bytes == plan.predicted_peak <= plan.budget_bytes


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = F.silu(layer(x).add_(1.0).mul_(2.0))
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x.mul(2.0).add_(self.mean)


def test_in_place_ops_and_mutated_buffers_happen_once() -> None:
    model = seeded(lambda: Loss(InPlace()))
    check_like_eager(model, batch())


class Normalized(nn.Module):
    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        blocks = [
            (nn.Conv2d(4 if place else 2, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU())
            for place in range(5)
        ]
        self.layers = nn.Sequential(*(layer for block in blocks for layer in block))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_statistics_are_updated_once(momentum: float | None) -> None:
    model = seeded(lambda: Loss(Normalized(momentum)))
    images = torch.randn(8, 2, 16, 16, generator=torch.Generator().manual_seed(0))
    optimized = check_like_eager(model, images, budget="1x", solver="full")
    assert any("batch_norm" in target for target in recomputed_targets(optimized))


class Aliases(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.kind = Stack(), kind

    def forward(self, x: torch.Tensor):
        hidden = self.body(x)
        loss = hidden.square().mean()
        if self.kind == "view of an input":
            return loss, x.view(-1)
        if self.kind == "two views of one storage":
            return loss, hidden[:4], hidden.t()
        if self.kind == "the input itself":
            return loss, x
        if self.kind == "one tensor twice":
            return loss, hidden, hidden
        return loss, self.body.layers[0].weight


@pytest.mark.parametrize(
    "kind", ["view of an input", "two views of one storage", "the input itself", "one tensor twice", "a parameter"]
)
def test_aliased_outputs_alias_as_in_eager(kind: str) -> None:
    model, x = seeded(Aliases, kind), batch()
    optimized = remat.optimize(model, "0.7x", time_limit=1)

    def run(module: nn.Module):
        module.zero_grad()
        torch.manual_seed(0)
        loss, *others = module(x)
        loss.backward()
        return loss, others, [parameter.grad for parameter in module.parameters()]

    eager_loss, eager_others, eager_gradients = run(model)
    loss, others, gradients = run(optimized)
    assert torch.equal(loss, eager_loss)
    assert all(map(torch.equal, gradients, eager_gradients))
    assert all(map(torch.equal, others, eager_others))
    sources = [x, model.body.layers[0].weight]
    assert _sharing([*sources, *others]) == _sharing([*sources, *eager_others])


def _sharing(tensors: list[torch.Tensor]) -> list[int]:
    """For each tensor, the first of the list that lies on the same storage."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [storages.index(storage) for storage in storages]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Stack(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.body(x)) + self.body(x)


def test_module_called_twice_inside_a_model_gets_the_sum_of_its_gradients() -> None:
    check_like_eager(seeded(lambda: Loss(Shared())), batch())


def test_model_called_twice_before_one_backward_gives_the_same_gradients() -> None:
    model, first, second = stack(), batch(1), batch(2)
    optimized = remat.optimize(model, "0.8x", time_limit=1)

    def run(module: nn.Module) -> list[torch.Tensor]:
        module.zero_grad()
        torch.manual_seed(0)
        (module(first) + 2 * module(second)).backward()
        return [parameter.grad for parameter in module.parameters()]

    eager = run(model)
    for _ in range(3):
        assert all(map(torch.equal, run(optimized), eager))
    plan = remat.plan_of(optimized)
    assert len(plan.fingerprint.graph_hashes) == 2
    model.zero_grad()
    measured = remat.measure(lambda: (run(optimized), model.zero_grad())).peak_bytes
    assert measured == pytest.approx(plan.predicted_peak, rel=0.01)
    assert measured <= plan.budget_bytes


def test_frozen_parameters_get_no_gradient() -> None:
    model = stack()
    model.body.layers[2].requires_grad_(False)
    check_like_eager(model, batch())
    assert model.body.layers[2].weight.grad is None


def test_unused_parameter_keeps_no_gradient() -> None:
    model = stack()
    model.body.unused = nn.Linear(WIDTH, WIDTH)
    optimized = remat.optimize(model, "0.7x", time_limit=1)
    optimized(batch()).backward()
    assert model.body.unused.weight.grad is None
    assert model.body.layers[0].weight.grad is not None


def test_without_gradients_nothing_is_planned() -> None:
    model = stack()
    optimized = remat.optimize(model, "0.7x")
    torch.manual_seed(0)
    with torch.no_grad():
        expected = model(batch())
    torch.manual_seed(0)
    with torch.no_grad():
        assert torch.equal(optimized(batch()), expected)
    with torch.inference_mode():
        optimized(batch())
    with pytest.raises(remat.RematError, match="no plan yet"):
        remat.plan_of(optimized)


def test_train_and_eval_mode_can_alternate() -> None:
    model = seeded(lambda: Loss(nn.Sequential(Stack(), nn.BatchNorm1d(WIDTH))))
    optimized = remat.optimize(model, "0.7x", time_limit=1)
    example, buffers = Example(model, (batch(),)), snapshot(model)
    for _ in range(2):
        for training in (True, False):
            model.train(training)
            eager = record(model, example, buffers)
            optimized.train(training)
            assert optimized.training is training
            assert differences(eager, record(optimized, example, buffers)) == []


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradient_accumulation_gives_the_same_sum(set_to_none: bool) -> None:
    model = stack()
    optimized = remat.optimize(model, "0.8x", time_limit=1)

    def run(module: nn.Module) -> list[torch.Tensor]:
        module.zero_grad(set_to_none=set_to_none)
        torch.manual_seed(0)
        for number in range(3):
            (module(batch(number)) / 3).backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    eager = run(model)
    for _ in range(2):
        assert all(map(torch.equal, run(optimized), eager))


def test_gradient_accumulation_stays_within_the_budget() -> None:
    model, x = stack(), batch()
    optimized = remat.optimize(model, "0.7x", time_limit=1)

    def step() -> None:
        for _ in range(2):
            optimized(x).backward()
        optimized.zero_grad()

    step()
    assert remat.measure(step).peak_bytes <= remat.plan_of(optimized).budget_bytes


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Stack(3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False)
        return x


def test_users_own_checkpoint_regions_give_the_same_bits() -> None:
    check_like_eager(seeded(lambda: Loss(Checkpointed())), batch(), budget="0.9x")


class Broken(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.before, self.after, self.how = Stack(4), Stack(4), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        if self.how == "print":
            print("half way")
        else:
            x = x * (1.0 if x.sum().item() > 0 else 2.0)
        return self.after(x)


@pytest.mark.parametrize("how", ["print", "item"])
def test_graph_breaks_share_one_budget(how: str) -> None:
    with pytest.warns(UserWarning, match="Not planned, runs as before"):
        optimized = check_like_eager(seeded(lambda: Loss(Broken(how))), batch())
    assert len(remat.plan_of(optimized).fingerprint.graph_hashes) > 1


def test_a_step_that_cannot_be_captured_runs_as_before() -> None:
    @torch.compiler.disable
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Stack(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return opaque(self.body(x)).square().mean()

    model = seeded(Opaque)
    example = Example(model, (batch(),))
    eager = record(model, example, {})
    optimized = remat.optimize(model, "0.9x", time_limit=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert differences(eager, record(optimized, example, {})) == []
    assert any("Not planned" in str(item.message) for item in told)
    assert differences(eager, record(optimized, example, {})) == []


class Reversed(torch.autograd.Function):
    """Computes its layer again in backward, and goes back by a call of its own, as reversible layers do."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        context.layer = layer
        context.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        (x,) = context.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = context.layer(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside, self.after = (Stack(3, 0.0) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self._apart(self.before(x))).square().mean()

    @torch._dynamo.disable
    def _apart(self, x: torch.Tensor) -> torch.Tensor:
        return Reversed.apply(x, self.inside)


@pytest.mark.filterwarnings("ignore")  # Dynamo does not go on after a break where what it is warned of is an error
def test_backward_within_a_backward_ends_no_watch() -> None:
    model = seeded(Reversible)
    expected = seeded(Reversible)
    optimized = remat.optimize(model, "1x", progress=False)
    for _ in range(4):
        for item, call in ((expected, expected), (model, optimized)):
            item.zero_grad()
            call(batch()).backward()
        assert not profiler_is_running(), "what watches a step ends with it"
        pairs = zip(expected.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    assert remat.plan_of(optimized).predicted_peak > 0
