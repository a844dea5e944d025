"""How people really write training loops: each way gives eager's bits and keeps the budget."""

from __future__ import annotations

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from tests.support.nets import BATCH, WIDTH, Stack, batch, seeded, stack
from tests.support.steps import differences, record, training_step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from remat import zoo
from remat.pytorch.costs.allocations import peak_of, watch
from remat.zoo import Example


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters()]


@pytest.mark.filterwarnings("ignore:A backward keeps its graph")
def test_backward_can_run_twice_where_the_graph_is_retained() -> None:
    model = stack()
    optimized = remat.optimize(model, "0.6x", time_limit=1)

    def run(module: nn.Module) -> list[torch.Tensor]:
        module.zero_grad()
        torch.manual_seed(0)
        loss = module(batch())
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(module)

    eager = run(model)
    assert all(map(torch.equal, run(optimized), eager))
    assert all(map(torch.equal, run(optimized), eager))


def test_second_backward_without_retained_graph_is_refused_as_in_eager() -> None:
    optimized = remat.optimize(stack(), "0.6x", time_limit=1)
    loss = optimized(batch())
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_forward_whose_result_is_dropped_leaves_nothing_behind() -> None:
    optimized = remat.optimize(seeded(Stack), "0.6x", time_limit=1)
    optimized(batch())
    # Raises where Remat still watches what happens after that forward.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        torch.ones(1)
    optimized(batch()).sum().backward()
    optimized(batch()).sum().backward()
    assert remat.plan_of(optimized).schedule.recomputed()


def test_step_under_the_users_own_profiler_is_planned_later() -> None:
    optimized = remat.optimize(seeded(Stack), "0.6x", time_limit=1)
    optimized(batch()).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        optimized(batch()).sum().backward()
    assert profiler.events()
    with pytest.raises(remat.RematError, match="no plan yet"):
        remat.plan_of(optimized)
    optimized.zero_grad()
    optimized(batch()).sum().backward()
    assert remat.plan_of(optimized).schedule.recomputed()


class LossAndFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Stack()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.body(x)
        return features.square().mean(), features


def test_gradient_for_an_output_guessed_unused_warns_and_is_right() -> None:
    model = seeded(LossAndFeatures)
    optimized = remat.optimize(model, "0.8x", time_limit=1)

    def run(module: nn.Module) -> list[torch.Tensor]:
        module.zero_grad()
        torch.manual_seed(0)
        loss, features = module(batch())
        (loss + features.sum()).backward()
        return gradients(module)

    eager = run(model)
    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match="received one"):
        found = run(optimized)
    assert all(map(torch.equal, found, eager))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, run(optimized), eager))


def test_parameter_changed_between_forward_and_backward_is_refused_as_in_eager() -> None:
    optimized = remat.optimize(stack(), "0.6x", time_limit=1)
    loss = optimized(batch())
    with torch.no_grad():
        optimized.body.layers[3].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_loss_outside_the_model_holds_the_budget_from_the_first_step_on() -> None:
    model, x, target = seeded(Stack), batch(), torch.arange(BATCH) % WIDTH

    def step(module: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(0)
        F.cross_entropy(module(x), target).backward()
        found = [parameter.grad for parameter in module.parameters()]
        module.zero_grad()
        return found

    eager = step(model)
    budget = int(0.7 * remat.measure(step, model).peak_bytes)
    optimized = remat.optimize(model, budget, time_limit=1)
    found, events = watch(lambda: step(optimized), torch.device("cpu"))
    resident = [*model.parameters(), x, target]
    first_peak = peak_of(events) + sum(tensor.untyped_storage().nbytes() for tensor in resident)
    assert all(map(torch.equal, found, eager))
    assert first_peak <= budget
    assert all(map(torch.equal, step(optimized), eager))
    assert all(map(torch.equal, step(optimized), eager))
    # The target goes into no graph: what the loss has saved tells of it.
    assert remat.measure(step, optimized).peak_bytes == remat.plan_of(optimized).predicted_peak <= budget


# Dynamo looks whether a loss has a `.grad` and silences torch's complaint, but not where warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_training_step_function_with_backward_and_optimizer_inside() -> None:
    def train(wrap):
        model = stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = wrap(step, optimizer)
        torch.manual_seed(0)
        losses = [run(batch(number)) for number in range(4)]
        return losses, [parameter.detach() for parameter in model.parameters()], run

    losses, parameters, _ = train(lambda step, optimizer: step)
    found, trained, run = train(lambda step, optimizer: remat.optimize(step, "0.8x", optimizer=optimizer, time_limit=1))
    assert all(map(torch.equal, found, losses))
    assert all(map(torch.equal, trained, parameters))
    plan = remat.plan_of(run)
    assert remat.measure(run, batch()).peak_bytes <= plan.budget_bytes


def test_each_input_shape_is_planned_by_itself() -> None:
    model = stack()
    optimized = remat.optimize(model, "0.6x", time_limit=1)
    largest_peak = 0
    budgets = {}
    for _ in range(2):
        for rows in (BATCH // 4, BATCH // 2, BATCH):
            example = Example(model, (batch(rows=rows),))
            eager = record(model, example, {})
            assert differences(eager, record(optimized, example, {})) == []
            largest_peak = max(largest_peak, remat.measure(training_step(model, example)).peak_bytes)
            assert remat.measure(training_step(optimized, example)).peak_bytes <= 0.6001 * largest_peak
            budgets.setdefault(rows, remat.plan_of(optimized).budget_bytes)
    assert len(set(budgets.values())) == 3


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_plan_stays_in_force_under_a_dispatch_mode() -> None:
    model = stack()
    example = Example(model, (batch(),))
    eager = record(model, example, {})
    optimized = remat.optimize(model, "0.5x", time_limit=1)
    with Counting():
        assert differences(eager, record(optimized, example, {})) == []
    plan = remat.plan_of(optimized)
    with Counting() as seen:
        assert differences(eager, record(optimized, example, {})) == []
    assert remat.plan_of(optimized) is plan
    ops = plan.problem.graph.ops
    again = [ops[number].target for number in plan.schedule.recomputed() if ops[number].target.startswith("aten.")]
    assert again
    # An op that overwrites is called by another name.
    name = again[0].rpartition(".")[0] + "."
    planned = sum(ops[number].target.startswith(name) for number in plan.schedule.steps)
    assert planned == sum(count for called, count in seen.calls.items() if called.startswith(name))


def test_saved_plan_gives_the_same_bits_when_applied(tmp_path) -> None:
    model = stack()
    example = Example(model, (batch(),))
    eager = record(model, example, {})
    plan = remat.plan(model, *example.args, budget="0.5x", time_limit=1)
    plan.save(tmp_path / "plan.json")
    applied = remat.apply(model, remat.Plan.load(tmp_path / "plan.json"))
    assert differences(eager, record(applied, example, {})) == []
    assert remat.measure(training_step(applied, example)).peak_bytes == plan.predicted_peak <= plan.budget_bytes
    assert remat.plan_of(applied) == plan


def test_plan_for_another_model_is_refused() -> None:
    plan = remat.plan(stack(depth=6), batch(), budget="0.6x", time_limit=1)
    with pytest.raises(remat.PlanMismatch, match="another"):
        remat.apply(stack(depth=5), plan)(batch())
    with pytest.raises(remat.PlanMismatch, match="another model"):
        remat.apply(stack(depth=6, dropout=0.0), plan)(batch())


def test_plan_for_another_shape_is_refused() -> None:
    plan = remat.plan(stack(), batch(), budget="0.6x", time_limit=1)
    with pytest.raises(remat.PlanMismatch, match="other shapes: number .* is float32"):
        remat.apply(stack(), plan)(batch(rows=BATCH // 2))


def test_budget_below_the_floor_names_the_smallest_feasible_one_and_its_op() -> None:
    model = stack()
    with pytest.raises(remat.InfeasibleBudget, match="op `") as caught:
        remat.optimize(model, "50kB", time_limit=1)(batch())
    budget = caught.value.min_budget
    optimized = remat.optimize(model, budget, time_limit=1)
    optimized(batch()).backward()
    assert remat.plan_of(optimized).predicted_peak <= budget


def test_torch_compile_finds_the_backend_by_name() -> None:
    model = stack()
    example = Example(model, (batch(),))
    eager = record(model, example, {})
    compiled = torch.compile(model, backend="remat", options={"budget": "0.6x", "time_limit": 1})
    found = {name.replace("_orig_mod.", ""): value for name, value in record(compiled, example, {}).items()}
    assert differences(eager, found) == []


def test_option_of_the_backend_by_its_old_name_is_taken_with_a_warning() -> None:
    compiled = torch.compile(stack(), backend="remat", options={"budget": "0.6x", "time_limit_s": 1})
    with pytest.warns(FutureWarning, match="'time_limit_s' is called 'time_limit' now"):
        compiled(batch()).backward()


def test_state_dict_and_parameters_are_those_of_the_model() -> None:
    model = stack()
    optimized = remat.optimize(model, "0.6x")
    assert isinstance(optimized, type(model))
    assert list(optimized.state_dict()) == list(model.state_dict())
    assert all(map(lambda left, right: left is right, optimized.parameters(), model.parameters()))


def test_outputs_that_the_caller_drops_stay_within_the_budget() -> None:
    model, x = seeded(LossAndFeatures), batch()
    optimized = remat.optimize(model, "0.7x", time_limit=1)
    example = Example(model, (x,))

    def step(module: nn.Module) -> None:
        loss = module(x)[0]
        loss.backward()
        module.zero_grad()

    step(optimized)
    plan = remat.plan_of(optimized)
    assert remat.measure(step, optimized).peak_bytes <= plan.predicted_peak <= plan.budget_bytes
    assert differences(_first_output(model, example), _first_output(optimized, example)) == []


def test_peak_is_predicted_where_the_caller_drops_an_output() -> None:
    model, x = seeded(LossAndFeatures), batch()
    optimized = remat.optimize(model, "0.7x", time_limit=1)

    def step() -> None:
        loss = optimized(x)[0]
        loss.backward()
        optimized.zero_grad()

    step()
    step()
    assert remat.plan_of(optimized).predicted_peak == pytest.approx(remat.measure(step).peak_bytes, rel=0.01)


def test_output_kept_after_it_was_dropped_stays_within_the_budget() -> None:
    model, x = seeded(LossAndFeatures), batch()
    optimized = remat.optimize(model, "0.7x", time_limit=1)

    def step() -> None:
        loss = optimized(x)[0]
        loss.backward()
        optimized.zero_grad()

    def keeping_step() -> None:
        loss, features = optimized(x)
        loss.backward()
        del features
        optimized.zero_grad()

    step()
    dropping = remat.plan_of(optimized)
    assert remat.measure(keeping_step).peak_bytes <= dropping.budget_bytes
    keeping = remat.plan_of(optimized)
    assert keeping.schedule == dropping.schedule
    assert remat.measure(keeping_step).peak_bytes == keeping.predicted_peak
    step()
    assert remat.plan_of(optimized) is keeping


class Features(nn.Module):
    """Returns features twice over: the second is larger and not needed for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.body(x)
        return features, features.detach().repeat(1, 2) + 1


def test_output_of_a_watched_step_that_is_kept_later_warns_and_is_planned_for() -> None:
    model, x = seeded(Features), batch()
    optimized = remat.optimize(model, "0.8x", time_limit=1)
    kept: list[torch.Tensor] = []

    def step(keeps: bool) -> None:
        features, other = optimized(x)
        if keeps:
            kept.append(other)
        del other
        features.square().mean().backward()
        optimized.zero_grad()
        kept.clear()

    for _ in range(3):
        step(keeps=False)
    with pytest.warns(UserWarning, match="were kept in this one"):
        step(keeps=True)
    step(keeps=True)
    plan = remat.plan_of(optimized)
    assert remat.measure(step, keeps=True).peak_bytes == plan.predicted_peak <= plan.budget_bytes


def _first_output(module: nn.Module, example: Example) -> dict[str, torch.Tensor | None]:
    torch.manual_seed(0)
    module.zero_grad()
    module(*example.args)[0].backward()
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore:Not planned, runs as before")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_step_is_planned_around_a_recurrent_layer_that_cannot_be_traced() -> None:
    example = zoo.build("lstm", scale="tiny")
    example.model.train()
    eager = record(example.model, example, {})
    optimized = remat.optimize(example.model, "50x")
    # As on CUDA, where the layer is cuDNN's.
    optimized._compiled_call_impl._device = torch.device("cuda")
    for _ in range(3):
        assert differences(eager, record(optimized, example, {})) == []
    plan = remat.plan_of(optimized)
    assert any("embedding" in op.target for op in plan.problem.graph.ops)
    assert not any("rnn" in op.target for op in plan.problem.graph.ops)
    assert plan.predicted_peak == remat.measure(training_step(optimized, example)).peak_bytes


def test_step_that_dislikes_fake_tensors_runs_as_before_with_one_warning() -> None:
    library = torch.library.Library("remat_test_usage", "DEF")
    library.define("real_alone(Tensor x) -> Tensor")
    library.impl("real_alone", lambda x: x * 2, "CompositeExplicitAutograd")

    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not on fake tensors")

    torch.library.register_fake("remat_test_usage::real_alone", refuse, lib=library)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = stack(), stack()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps.add_(1)
            weight = torch.ops.remat_test_usage.real_alone(x.detach()).mean()
            return self.first(x) * weight + self.second(x)

    model = Model()
    example = Example(model, (batch(),))
    start = {"steps": torch.zeros(())}
    eager = record(model, example, start)
    optimized = remat.optimize(model, "0.8x", time_limit=1)
    with pytest.warns(UserWarning, match="Not planned, runs as before: .*not on fake tensors") as heard:
        found = record(optimized, example, start)
    assert differences(eager, found) == []
    assert differences(eager, record(optimized, example, start)) == []
    assert len(heard) == 1


class Broken(nn.Module):
    """Two graphs: the first ends with results of one shape written over one of another; the second changes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x) * x.mean(1, keepdim=True) + 1.0
        torch._dynamo.graph_break()
        return h.mul_(0.5).square().mean()


def test_output_that_was_written_over_another_result_can_be_changed_in_place() -> None:
    model = seeded(Broken)
    example = Example(model, (batch().reshape(4, -1, WIDTH),))
    eager = record(model, example, {})
    optimized = remat.optimize(model, "1x", time_limit=1)
    with pytest.warns(UserWarning, match="graph_break"):
        assert differences(eager, record(optimized, example, {})) == []
    for _ in range(2):
        assert differences(eager, record(optimized, example, {})) == []
