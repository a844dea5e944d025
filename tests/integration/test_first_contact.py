"""What people do in their first hour with an optimized model: each once fell at the first step, or silently."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat.errors import BudgetError, InfeasibleBudget, RematError
from remat.pytorch.measure.measure_step import measure_once
from remat.pytorch.resident.beside import ModelsBeside

WIDTH = 32


class Net(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x), y)


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Features(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class AsksInLoop(Net):
    """Dynamo gives up on a loop in which a value is asked for."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            change = layer(x)
            if float(change.detach().abs().mean()) < 1e6:
                x = x + change
        return F.cross_entropy(self.head(x), y)


class Averaging(nn.Module):
    """Batch norms that average over all batches so far, and so look at how many there were."""

    def __init__(self, dims: int, affine: bool) -> None:
        super().__init__()
        kinds: dict[int, tuple[Any, Any]] = {1: (nn.Conv1d, nn.BatchNorm1d), 2: (nn.Conv2d, nn.BatchNorm2d)}
        convolution, norm = kinds[dims]
        blocks = [(convolution(8, 8, 3, padding=1), norm(8, momentum=None, affine=affine), nn.ReLU()) for _ in range(5)]
        self.body = nn.Sequential(*(layer for block in blocks for layer in block))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(x).flatten(2).mean(2)), y)


def make(kind: type[Net] = Net) -> Any:
    torch.manual_seed(0)
    return kind()


def batch(size: int = 256, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, WIDTH, generator=generator), torch.randint(5, (size,), generator=generator)


def gradients(model: nn.Module, loss: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    value = loss()
    value.backward()
    return value.detach(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_same(one: tuple[torch.Tensor, list[torch.Tensor]], other: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    assert torch.equal(one[0], other[0])
    assert len(one[1]) == len(other[1]) and all(map(torch.equal, one[1], other[1]))


def plain_peak(model: nn.Module, *args: Any) -> int:
    peak = measure_once(model, *args).peak_bytes
    model.zero_grad()
    return peak


def test_hook_registered_after_the_first_step_is_seen() -> None:
    model, data = make(), batch()
    step = remat.optimize(model, "0.8x")
    gradients(model, lambda: step(*data))
    handle = model.layers[1].register_forward_hook(lambda module, args, result: 2 * result)
    assert_same(gradients(model, lambda: step(*data)), gradients(model, lambda: model(*data)))
    handle.remove()
    assert_same(gradients(model, lambda: step(*data)), gradients(model, lambda: model(*data)))


def test_smaller_last_batch_has_the_budget_of_the_others() -> None:
    model = make()
    step = remat.optimize(model, "0.7x")
    budgets = []
    for size in (256, 256, 40, 256, 40):
        data = batch(size)
        assert_same(gradients(model, lambda data=data: step(*data)), gradients(model, lambda data=data: model(*data)))
        budgets.append(remat.plan_of(step).budget_bytes)
    # What plain PyTorch needs is followed at some sizes, and scaled to the others.
    assert max(budgets) <= 1.001 * min(budgets)


def test_larger_batch_raises_what_a_share_of_the_plain_peak_is() -> None:
    model = make()
    step = remat.optimize(model, "0.8x")
    step(*batch(64)).backward()
    before = remat.plan_of(step).budget_bytes
    step(*batch(256)).backward()
    assert remat.plan_of(step).budget_bytes > before


def test_later_shape_that_does_not_fit_goes_on_or_raises_as_asked() -> None:
    model = make()
    budget = int(0.9 * plain_peak(model, *batch()))
    step = remat.optimize(model, budget)
    step(*batch()).backward()
    large = batch(2048)
    with pytest.warns(UserWarning, match="goes on with the leanest plan known, .* over its budget"):
        planned = gradients(model, lambda: step(*large))
    assert_same(planned, gradients(model, lambda: model(*large)))
    strict = remat.optimize(model, budget, on_infeasible="raise")
    strict(*batch()).backward()
    with pytest.raises(InfeasibleBudget):
        strict(*large)
    with pytest.raises(RematError, match=r"There is no on_infeasible='stop'; write 'go on' or 'raise'\."):
        remat.optimize(model, budget, on_infeasible="stop")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_kernels")
def test_compiled_step_keeps_one_budget_for_all_shapes() -> None:
    model, budgets = Net(depth=1), []
    step = remat.optimize(model, "0.9x", compiler="inductor")
    for size in (256, 40):
        step(*batch(size)).backward()
        model.zero_grad()
        budgets.append(remat.plan_of(step).budget_bytes)
    assert budgets[0] == budgets[1]


@pytest.mark.long
@pytest.mark.usefixtures("quick_kernels")
def test_compiled_step_goes_on_with_a_shape_that_does_not_fit() -> None:
    model = Net(depth=2)
    step = remat.optimize(model, "0.9x", compiler="inductor")
    step(*batch(256)).backward()
    tight = remat.optimize(model, remat.plan_of(step).budget_bytes, compiler="inductor")
    tight(*batch()).backward()
    with pytest.warns(UserWarning, match="goes on with the leanest plan known"):
        tight(*batch(2048)).backward()


def test_budget_below_a_byte_is_asked_back() -> None:
    with pytest.raises(BudgetError, match='did you mean "0.5x" of the plain peak'):
        remat.optimize(make(), 0.5)


def test_model_that_is_dropped_is_freed_with_its_session() -> None:
    counts = []
    for _ in range(3):
        model = make()
        step = remat.optimize(model, "0.8x")
        optimizer = torch.optim.AdamW(model.parameters())
        for seed in range(3):
            step(*batch(seed=seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
        references = [weakref.ref(parameter) for parameter in model.parameters()]
        del model, step, optimizer
        gc.collect()
        assert all(reference() is None for reference in references)
        counts.append(sum(type(item).__name__ == "TracedGraph" for item in gc.get_objects()))
    assert counts[0] == counts[-1]


def test_backend_of_torch_compile_counts_the_optimizers_state() -> None:
    model, data = make(), batch()
    optimizer = torch.optim.AdamW(model.parameters())

    def training_step(step: Any) -> None:
        step(*data).backward()
        optimizer.step()
        optimizer.zero_grad()

    training_step(model)
    budget = int(0.75 * remat.measure(lambda: training_step(model)).peak_bytes)
    compiled = torch.compile(model, backend="remat", options={"budget": budget})
    training_step(compiled)
    assert remat.measure(lambda: training_step(compiled)).peak_bytes <= budget


def test_transforms_of_functions_run_unplanned_with_a_warning() -> None:
    model, data = make(), batch()
    step = remat.optimize(model, "0.8x")

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(step, parameters, data)

    with pytest.warns(UserWarning, match="inside a transform of torch.func"):
        found = torch.func.grad(loss)(dict(model.named_parameters()))
    _, expected = gradients(model, lambda: model(*data))
    assert all(map(torch.equal, found.values(), expected))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.func.grad(loss)(dict(model.named_parameters()))


@pytest.mark.slow
def test_loop_that_asks_for_values_is_planned_layer_by_layer() -> None:
    model, data = make(AsksInLoop), batch()
    peak = plain_peak(model, *data)
    step = remat.optimize(model, "0.85x")
    with pytest.warns(UserWarning, match="Not planned, runs as before"):
        for _ in range(3):
            planned = gradients(model, lambda: step(*data))
    assert_same(planned, gradients(model, lambda: model(*data)))
    model.zero_grad()
    assert measure_once(step, *data).peak_bytes <= 0.85 * peak
    plan = remat.plan_of(step)
    assert len(plan.fingerprint.graph_hashes) == len(model.layers) + 1
    assert plan.plain_peak_bytes == pytest.approx(peak, rel=0.02), "followed with a number that was made up"


@pytest.mark.parametrize(("dims", "affine"), [(2, True), (2, False), (1, True)])
def test_batch_norms_that_average_over_all_batches_are_planned_in_one_graph(dims: int, affine: bool) -> None:
    torch.manual_seed(0)
    plain = Averaging(dims, affine)
    model = copy.deepcopy(plain)
    x, y = torch.randn(16, 8, *((16, 16) if dims == 2 else (256,))), torch.randint(5, (16,))
    peak = plain_peak(copy.deepcopy(plain), x, y)
    step = remat.optimize(model, "0.7x", time_limit=2, progress=False)
    for number in range(1, 5):
        data = (number * x + number, y)
        planned = gradients(model, lambda data=data: step(*data))
        assert_same(planned, gradients(plain, lambda data=data: plain(*data)))
        assert all(map(torch.equal, model.buffers(), plain.buffers()))
    model.zero_grad()
    plan = remat.plan_of(step)
    assert len(plan.fingerprint.graph_hashes) == 1
    assert plan.plain_peak_bytes == pytest.approx(peak, rel=0.02)
    assert measure_once(step, x, y).peak_bytes <= plan.budget_bytes


def test_result_that_is_not_assigned_is_told() -> None:
    with pytest.warns(UserWarning, match=r"write model = remat.optimize\(model, …\)"):
        remat.optimize(make(), "0.5x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = remat.optimize(make(), "0.5x")
        assert [remat.optimize(step, "0.5x")] and (lambda: remat.optimize(step, "0.5x"))()


def test_scheduler_of_learning_rates_keeps_its_count_of_steps() -> None:
    model, data = make(), batch(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def training_step() -> None:
        model(*data).backward()
        optimizer.step()
        optimizer.zero_grad()

    step = remat.optimize(training_step, "0.9x")
    before = optimizer.__dict__["step"]
    step()
    assert optimizer.__dict__["step"] is before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


TEACHER: Any = None


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("is_global", [False, True])
def test_teacher_beside_the_student_counts(is_frozen: bool, is_global: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = batch()
    student, teacher = make(Features), make(Features)
    still = teacher.requires_grad_(False) if is_frozen else teacher.eval()
    monkeypatch.setitem(globals(), "TEACHER", still if is_global else None)

    def step_of(model: Any) -> Callable[[], None]:
        def step() -> None:
            with torch.set_grad_enabled(is_frozen):
                target = TEACHER(x) if is_global else still(x)
            F.mse_loss(model(x), target).backward()

        return step

    plain = measure_once(step_of(student))
    student.zero_grad()
    optimized = remat.optimize(student, int(0.8 * plain.peak_bytes), time_limit=1, progress=False)
    step = step_of(optimized)
    for _ in range(3):
        step()
        student.zero_grad()
    plan = remat.plan_of(optimized)
    measured = measure_once(step).peak_bytes
    assert plan.plain_peak_bytes == pytest.approx(plain.peak_bytes, rel=0.01)
    assert measured == pytest.approx(plan.predicted_peak, rel=0.01) and measured <= plan.budget_bytes


def test_variables_of_who_calls_the_step_are_looked_at_and_not_kept() -> None:
    models, x = ModelsBeside(), torch.ones(3)
    other = nn.Linear(2, 2).eval()
    models.look()
    assert models.models() == [other]
    gone = x + 1
    reference = weakref.ref(gone)
    models.look()
    del gone
    assert reference() is None, "a look keeps nothing alive"
    del other
    assert models.models() == []
