"""What an attack on the promise of equal bits within the budget has found, one test for each cause."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from remat.pytorch.measure.measure_step import measure_once
from remat.pytorch.run.optimize import session_of

X = torch.randn(8, 10, 16, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(4, 6, 8, 8, generator=torch.Generator().manual_seed(1))
Step = Callable[[Any], None]


class Composed(nn.Module):
    """A module whose forward is a function of itself."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: torch.Tensor) -> Any:
        return self._forward(self, *args)


def linear(forward: Callable[..., Any], width: int = 12) -> Callable[[], nn.Module]:
    return lambda: Composed(forward, layer=nn.Linear(16, width))


def trained_alike(make: Callable[[], nn.Module], step: Step, budget: str = "1x", steps: int = 3) -> Any:
    """Train plainly and optimized; every gradient and buffer has to be the same to the bit in every step."""
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    optimized = remat.optimize(model, budget, time_limit=0.5, progress=False)
    for number in range(steps):
        for item, call in ((plain, plain), (model, optimized)):
            item.zero_grad()
            torch.manual_seed(number)
            step(call)
        for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad.to_dense(), other.grad.to_dense()), f"{name} in step {number}"
        for (name, one), other in zip(plain.named_buffers(), model.buffers(), strict=True):
            assert torch.equal(one, other), f"{name} in step {number}"
    model.zero_grad()
    return optimized


def within_budget(optimized: Any, step: Step) -> None:
    plan, peak = remat.plan_of(optimized), measure_once(step, optimized).peak_bytes
    assert peak <= plan.budget_bytes
    assert peak == pytest.approx(plan.predicted_peak, abs=64)


def backward(call: Any) -> None:
    call(X).backward()


@pytest.mark.parametrize("dim", [-1, 1])
def test_softmax_is_not_overwritten_where_its_kernel_ignores_strides(dim: int) -> None:
    targets = torch.randint(0, 10, (8, 12), generator=torch.Generator().manual_seed(2))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(F.log_softmax(self.layer(x), dim).transpose(1, 2)[:, :10], targets[:, :10])

    trained_alike(linear(forward), backward)


@pytest.mark.parametrize("activation", [F.selu, F.elu, F.hardtanh, F.softshrink, F.hardshrink])
def test_activations_of_transposed_tensors_keep_their_bits(activation: Any) -> None:
    optimized = trained_alike(
        linear(lambda self, x: activation(self.layer(x).transpose(1, 2)).pow(2).sum(1).mean()), backward
    )
    within_budget(optimized, backward)


def test_batch_norm_between_transposes_runs() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.layer(x).transpose(1, 2)).transpose(1, 2))[0].mean()

    def make() -> nn.Module:
        last = nn.LSTM(12, 8, batch_first=True)
        return Composed(forward, layer=nn.Linear(16, 12), norm=nn.BatchNorm1d(12), last=last)

    trained_alike(make, backward)


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss, F.huber_loss, F.l1_loss])
def test_scalar_that_keeps_a_large_storage_is_counted(loss: Any) -> None:
    target = torch.ones(8, 10, 12)
    optimized = trained_alike(
        linear(lambda self, x, t: loss(self.layer(x), t)), lambda call: call(X, target).backward()
    )
    within_budget(optimized, lambda call: call(X, target).backward())


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_resized_images_are_computed_as_in_eager(mode: str) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(self.layer(x), scale_factor=2, mode=mode).pow(2).mean()

    make = lambda: Composed(forward, layer=nn.Conv2d(6, 6, 3, padding=1))  # noqa: E731
    trained_alike(make, lambda call: call(IMAGE).backward())


def test_in_place_ops_with_a_factor_are_rounded_once() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return (
            self.layer(x).addcmul_(x, x, value=0.1).add_(x, alpha=0.3).addcdiv_(x, x.abs() + 1, value=0.7).pow(2).mean()
        )

    trained_alike(linear(forward, width=16), backward)


class Doubling(nn.Module):
    """Updates a buffer that it reads, and returns a loss and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 12)
        self.register_buffer("scale", torch.ones(12))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.scale.mul_(2)
        result = self.layer(x) * self.scale
        return result.mean(), result.pow(3)


def _both(call: Any) -> None:
    loss, other = call(X)
    (loss + other.sum()).backward()


def _one_after_the_other(call: Any) -> None:
    loss, other = call(X)
    (loss + other.sum()).backward(retain_graph=True)
    (2 * loss + other.sum()).backward()


@pytest.mark.filterwarnings("ignore:An output that mostly has no gradient")
@pytest.mark.filterwarnings("ignore:A backward keeps its graph")
@pytest.mark.filterwarnings("ignore:Budget .* is below")
@pytest.mark.parametrize("step", [_both, _one_after_the_other])
def test_unexpected_gradient_finds_the_buffers_that_forward_had(step: Step) -> None:
    trained_alike(Doubling, step)


def _stack() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(5)])


def _twice(call: Any) -> None:
    loss = call(X).pow(2).mean()
    loss.backward(retain_graph=True)
    (3 * loss).backward()


def test_step_that_keeps_its_graph_is_planned_for_it() -> None:
    with pytest.warns(UserWarning, match="keeps its graph"):
        optimized = trained_alike(
            lambda: Composed(lambda self, x: self.layer(x), layer=_stack()), _twice, "0.95x", steps=4
        )
    plan, peak = remat.plan_of(optimized), measure_once(_twice, optimized).peak_bytes
    assert peak <= plan.budget_bytes


@pytest.mark.filterwarnings("ignore:Not planned, runs as before")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_guard_on_a_number_is_captured_once() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        if hidden.norm().item() > 1e9:
            hidden = hidden / 2
        return hidden.pow(2).mean()

    model, graphs = linear(forward)(), []
    optimized = remat.optimize(model, "1x", time_limit=0.5, progress=False)
    for number in range(8):
        model.zero_grad()
        optimized(X * (1 + number)).backward()
        graphs.append(len(session_of(optimized).graphs))
    assert graphs[-1] == graphs[3]
    assert session_of(optimized).left_out == 0


def _detached(self: Any, x: torch.Tensor) -> Any:
    result = torch.relu_(self.layer(x))
    return result.pow(2).mean(), result.detach()


def _viewed(self: Any, x: torch.Tensor) -> Any:
    result = torch.relu_(self.layer(x))
    return result.pow(2).mean(), result.view(-1)


@pytest.mark.parametrize("forward", [_detached, _viewed])
def test_in_place_result_can_be_returned_by_another_name(forward: Any) -> None:
    trained_alike(linear(forward), lambda call: call(X)[0].backward())


def test_gradient_of_a_view_that_nobody_uses_leaves_a_layout_that_fits() -> None:
    targets = torch.randint(0, 12, (8, 10), generator=torch.Generator().manual_seed(2))

    def forward(self: Any, x: torch.Tensor) -> Any:
        logits = self.layer(x)
        return F.cross_entropy(logits.transpose(1, 2), targets), logits.transpose(1, 2)

    trained_alike(linear(forward), lambda call: call(X)[0].backward())


@pytest.mark.filterwarnings("ignore:A graph of .* runs unplanned")
def test_sparse_gradients_are_measured() -> None:
    rows = torch.randint(0, 50, (6, 7), generator=torch.Generator().manual_seed(2))
    make = lambda: Composed(lambda self, i: self.table(i).pow(2).sum(), table=nn.Embedding(50, 8, sparse=True))  # noqa: E731
    model = make()
    model(rows).backward()
    assert measure_once(lambda: model(rows).backward()).peak_bytes > 50 * 8 * 4
    trained_alike(make, lambda call: call(rows).backward())


def test_empty_batch_trains() -> None:
    none = torch.zeros(0, dtype=torch.long)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.relu(self.layer(x)), none, reduction="sum")

    trained_alike(linear(forward), lambda call: call(X[0][:0]).backward())


def test_argument_that_nobody_reads_is_counted() -> None:
    unused = torch.randn(64, 64)
    step = lambda call: call(X, unused).backward()  # noqa: E731
    optimized = trained_alike(linear(lambda self, x, _: self.layer(x).pow(2).mean()), step)
    within_budget(optimized, step)


@pytest.mark.parametrize(
    "pick",
    [
        lambda h: h[:, torch.tensor([0, 3, 3, 5])],
        lambda h: h.index_select(1, torch.tensor([0, 2, 4])),
        lambda h: h.scatter_add(1, torch.zeros(8, 10, 12, dtype=torch.long), h),
    ],
)
def test_scattered_gradients_need_no_more_than_in_eager(pick: Any) -> None:
    optimized = trained_alike(linear(lambda self, x: pick(self.layer(x)).pow(2).mean()), backward)
    assert remat.plan_of(optimized).predicted_peak <= remat.plan_of(optimized).budget_bytes


@pytest.mark.parametrize("regions", [1, 2])
def test_layer_used_twice_under_autocast_adds_its_gradients_as_in_eager(regions: int) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = F.gelu(self.layer(x))
            hidden = self.layer(hidden) if regions == 1 else hidden
        with torch.autocast("cpu", torch.bfloat16):
            hidden = hidden if regions == 1 else self.layer(hidden)
        return hidden.float().pow(2).mean()

    trained_alike(linear(forward, width=16), backward)


def test_layer_used_twice_in_a_checkpointed_region_under_autocast_adds_its_gradients_as_in_eager() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = checkpoint(lambda h: F.gelu(self.layer(F.gelu(self.layer(h)))), x, use_reentrant=False)
        return hidden.float().pow(2).mean()

    trained_alike(linear(forward, width=16), backward)


def test_checkpointed_regions_traced_alone_draw_the_same_mask_twice() -> None:
    def region(self: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda h: F.dropout(self.layer(h), self.rate), x, use_reentrant=False)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) / (1.0 + x.detach().abs().mean().item())
        return x.pow(2).mean()

    def make() -> nn.Module:
        layers = nn.ModuleList(Composed(region, layer=nn.Linear(16, 16)) for _ in range(3))
        for layer, rate in zip(layers, (0.2, 0.4, 0.6), strict=True):
            layer.rate = rate
        return Composed(forward, layers=layers)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        trained_alike(make, backward)


def test_products_of_groups_are_planned_in_fp32() -> None:
    ends = torch.tensor([20, 50, 80], dtype=torch.int32)

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (nn.Parameter(torch.randn(3, *shape)) for shape in ((16, 32), (32, 16)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = F.gelu(torch._grouped_mm(x.reshape(-1, 16), self.up, offs=ends))
            return torch._grouped_mm(hidden, self.down, offs=ends).pow(2).mean()

    optimized = trained_alike(Experts, backward)
    assert remat.plan_of(optimized).predicted_peak <= remat.plan_of(optimized).budget_bytes


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(x)))


def around_relu(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.ReLU(), copy.deepcopy(layer))


@pytest.mark.parametrize(
    "model",
    [
        *(around_relu(layer) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.BatchNorm1d(10))),
        nn.Sequential(nn.Linear(16, 16), Residual(), nn.Linear(16, 16)),
    ],
    ids=lambda model: type(model[1]).__name__ + type(model[2]).__name__,
)
def test_1x_is_what_eager_needs_where_the_loss_outside_sets_the_peak(model: nn.Module) -> None:
    step = lambda call: call(X).square().mean().backward()  # noqa: E731
    step(model)
    model.zero_grad()
    plain = measure_once(lambda: step(model)).peak_bytes
    optimized = remat.optimize(model, "1x", time_limit=0.5, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model.zero_grad()
            step(optimized)
    assert remat.plan_of(optimized).plain_peak_bytes == pytest.approx(plain, abs=64)


@pytest.mark.filterwarnings("ignore:Not planned, runs as before")
def test_output_that_gets_no_gradient_in_a_later_graph_may_have_any_layout() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        middle = self.attention(x, x, x, need_weights=False)[0] + x
        hidden = self.layer(middle)
        # A question that ends the graph; what stays at hand is an output of the first one.
        scale = 2.0 if torch.any(x > 1e9) else 1.0
        return hidden.square().mean() * scale + 0 * middle.detach().mean()

    def make() -> nn.Module:
        attention = nn.MultiheadAttention(16, 2, batch_first=True)
        return Composed(forward, attention=attention, layer=nn.Linear(16, 16))

    trained_alike(make, backward)


def test_what_dynamo_cannot_trace_is_said_also_where_it_speaks_of_backward() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        hidden.register_hook(lambda gradient: gradient * 2)
        # Torch 2.11 takes the hook for a function of its own, whose result must not be changed.
        return hidden.mul_(0.5).pow(2).mean()

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        optimized = trained_alike(linear(forward), backward)
    planned = bool(session_of(optimized).planned)
    assert planned != any("Not planned, runs as before" in str(item.message) for item in heard)


def test_batch_of_one_is_traced_with_the_strides_it_has() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        image = x.transpose(1, 2).reshape(1, 16, 3, 3)
        hidden = F.relu(self.conv(image) + image).flatten(2).transpose(1, 2)
        return self.layer(hidden).pow(2).mean()

    make = lambda: Composed(forward, conv=nn.Conv2d(16, 16, 3, padding=1), layer=nn.Linear(16, 12))  # noqa: E731
    trained_alike(make, lambda call: call(X[:1, :9]).backward())


def test_two_calls_before_one_backward_stay_within_the_budget() -> None:
    other = X.flip(0)
    step = lambda call: (call(X) + call(other)).backward()  # noqa: E731
    model = Composed(lambda self, x: self.layer(x).pow(2).mean(), layer=_stack())
    optimized = remat.optimize(model, "0.9x", time_limit=0.5, progress=False)
    for _ in range(3):
        model.zero_grad()
        step(optimized)
    model.zero_grad()
    within_budget(optimized, step)


def test_measured_peak_is_the_same_at_every_call() -> None:
    model = _stack()

    def step() -> None:
        model.zero_grad()
        model(X).pow(2).mean().backward()

    step()
    assert len({measure_once(step).peak_bytes for _ in range(4)}) == 1


def test_other_threads_run_unplanned_and_right() -> None:
    model = Composed(lambda self, x: self.layer(x).pow(2).mean(), layer=_stack())
    optimized = remat.optimize(model, "0.9x", time_limit=0.5, progress=False)
    parameters, wrong = list(model.parameters()), []
    expected = [torch.autograd.grad(model(X * k), parameters) for k in range(3)]

    def work(number: int) -> None:
        try:
            for _ in range(6):
                found = torch.autograd.grad(optimized(X * number), parameters)
                wrong.extend(name for name in range(len(found)) if not torch.equal(found[name], expected[number][name]))
        except BaseException as error:
            wrong.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_step_whose_loss_is_outside_is_refused_before_it_runs() -> None:
    model = _stack()
    with pytest.raises(remat.InfeasibleBudget):
        remat.optimize(model, "10kB", progress=False)(X)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_training_that_has_begun_goes_on_with_the_leanest_plan() -> None:
    model = _stack()
    optimized = remat.optimize(model, "0.2x", time_limit=0.5, progress=False)
    plain = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="over its budget"):
        for _ in range(3):
            for item, call in ((model, optimized), (plain, plain)):
                item.zero_grad()
                call(X).pow(2).mean().backward()
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(model.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    "kind", [nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2), nn.Dropout1d(0.2)]
)
def test_dropout_of_transposed_tensors_draws_as_in_eager(kind: nn.Module) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.kind(self.layer(x).transpose(1, 2)).pow(2).sum(1).mean()

    trained_alike(lambda: Composed(forward, layer=nn.Linear(16, 12), kind=copy.deepcopy(kind)), backward, "0.9x")


def test_step_that_is_captured_under_a_profiler_leaves_it_running(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    model = Composed(lambda self, x: self.layer(x).pow(2).mean(), layer=_stack())
    optimized = remat.optimize(model, "1x", time_limit=0.5, progress=False)
    with pytest.warns(UserWarning, match="only estimated"), torch.profiler.profile(profile_memory=True) as profiler:
        optimized(X).backward()
    assert len(profiler.events()) > 0


@pytest.mark.parametrize("onednn", [True, False])
def test_layout_of_a_convolution_is_that_of_the_kernel_its_batch_is_given_to(
    monkeypatch: pytest.MonkeyPatch, onednn: bool
) -> None:
    """Without oneDNN, batches of 16 and more go to NNPACK on some machines, which returns another layout."""
    torch.manual_seed(0)
    parts = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3))
    model = Composed(lambda self, images: self.parts(images).square().mean(), parts=parts)
    model, images = (item.to(memory_format=torch.channels_last) for item in (model, torch.randn(16, 3, 30, 30)))
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", onednn)
    optimized = remat.optimize(copy.deepcopy(model), "1x")
    assert remat.verify(model, optimized, images).ok
    plan = remat.plan_of(optimized)
    assert remat.measure(optimized, images).peak_bytes == plan.predicted_peak <= plan.budget_bytes


def test_step_that_was_watched_is_planned_at_once_under_another_budget() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())))
    optimized = remat.optimize(model, "1x", time_limit=0.5, progress=False)

    def step(call: Any) -> None:
        call(X).square().mean().backward()

    # One to capture, one to watch; from then on there are gradients, and the step with them is watched in its turn.
    for _ in range(3):
        step(optimized)
    remat.set_budget(optimized, "0.9x")
    peak = measure_once(step, optimized).peak_bytes
    assert peak <= remat.plan_of(optimized).budget_bytes
    remat.set_budget(optimized, 1000)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(remat.InfeasibleBudget):
        step(optimized)
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(before, model.parameters(), strict=True))
