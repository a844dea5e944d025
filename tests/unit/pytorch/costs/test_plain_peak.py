"""The peak of plain eager, found without running it, is what eager really takes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from tests.support.nets import WIDTH, Loss, Stack, batch, stack
from tests.support.steps import training_step
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from remat.pytorch._compat.fakes import FakeTensor
from remat.pytorch.costs.eager_step import eager_step
from remat.pytorch.costs.plain_peak import loss_like
from remat.pytorch.measure.measure_step import measure_once
from remat.pytorch.run.optimize import session_of
from remat.zoo import Example


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu_(layer(x).add_(1.0))
        return x


class Saves(nn.Module):
    """Needs more at the end of forward than in backward, and checkpoints half of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Stack(3), Stack(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False)).repeat(1, 8)


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 4))


def _frozen() -> nn.Module:
    model = Stack(4)
    model.layers[1].requires_grad_(False)
    return model


@pytest.mark.parametrize("make", [Stack, InPlace, _normed, _frozen, Saves])
def test_plain_peak_is_what_eager_takes(make) -> None:
    example = Example(Loss(make()), (batch(),))
    plan = remat.plan(example.model, *example.args, budget="50x", solver="none")
    measured = remat.measure(training_step(example.model, example)).peak_bytes
    # Small buffers that live inside one kernel, and generator states that `checkpoint` keeps.
    assert plan.plain_peak_bytes == pytest.approx(measured, rel=0.004)


def test_share_budget_is_a_share_of_the_plain_peak() -> None:
    plan = remat.plan(stack(), batch(), budget="0.8x", time_limit=1)
    assert plan.budget_bytes == int(0.8 * plan.plain_peak_bytes)


def test_scalars_are_taken_for_the_loss() -> None:
    loss, features = torch.ones((), requires_grad=True), torch.ones(3, requires_grad=True)
    assert loss_like([features, loss]) == [loss]
    assert loss_like([features, torch.ones(())])[0] is features
    assert loss_like([torch.ones(())]) == []


class Turned(nn.Module):
    """Kernels that lay their results out in another way than their fake versions say, then ops that copy or do not."""

    def __init__(self, op) -> None:
        super().__init__()
        self.op, self.layer = op, nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.op(self.layer(x).transpose(1, 2)).transpose(1, 2).contiguous()
        return x.square().mean()


@pytest.mark.parametrize("op", [F.elu, F.softplus, lambda x: x.softmax(-1), lambda x: F.layer_norm(x, x.shape[-1:])])
def test_strides_are_those_of_the_kernels(op) -> None:
    x = torch.randn(16, 64, 48)
    plan = remat.plan(Turned(op), x, budget="50x", solver="none")
    assert plan.plain_peak_bytes == pytest.approx(measure_once(Turned(op), x).peak_bytes, rel=0.004)


class Gathered(nn.Module):
    """Autograd fills the gradients of what is indexed in place, and adds gradients up in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1024)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        wide = self.layer(x)
        parts = [wide.gather(1, index), wide[:, index[0]], wide.index_select(1, index[0]), wide[index[:, 0]]]
        return sum(part.tanh().square().mean() for part in parts)


def test_what_autograd_writes_in_place_counts_once() -> None:
    x, index = torch.randn(256, 16), torch.randint(256, (256, 8))
    plan = remat.plan(Gathered(), x, index, budget="50x", solver="none")
    assert plan.plain_peak_bytes == pytest.approx(measure_once(Gathered(), x, index).peak_bytes, rel=0.004)


@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_work_in_what_eager_calls_them_with(threads: int) -> None:
    """Both gradients of a convolution in one call, depthwise ones among them, whatever the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        layers = (nn.Conv2d(16, 16, 5, padding=2, groups=16), nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 3, padding=1))
        model, x = Loss(nn.Sequential(*layers)), torch.randn(8, 16, 24, 24)
        plan = remat.plan(model, x, budget="50x", solver="none")
        assert plan.plain_peak_bytes == pytest.approx(measure_once(model, x).peak_bytes, rel=0.002)
    finally:
        torch.set_num_threads(before)


class Asks(nn.Module):
    """Takes four times the memory where it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if torch.compiler.is_compiling():
            x = torch.cat([x, x.exp(), x.sin(), x.tanh()], 1)
        return x.square().mean()


def test_a_step_that_asks_whether_it_is_traced_is_followed_as_eager_runs_it() -> None:
    plan = remat.plan(Asks(), batch(), budget="50x", solver="none")
    assert plan.plain_peak_bytes == pytest.approx(measure_once(Asks(), batch()).peak_bytes, rel=0.004)


def test_where_the_other_path_cannot_be_followed_a_share_says_what_it_is_of() -> None:
    model = Asks()
    seen: list[torch.Tensor] = []
    model.layer.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    with pytest.warns(UserWarning, match="of the traced path.*has a hook"):
        remat.plan(model, batch(), budget="50x", solver="none")
    assert not any(isinstance(item, FakeTensor) for item in seen)
    remat.plan(model, batch(), budget="8GiB", solver="none")


class Dropped(nn.Module):
    """Might leave out layers at random, which breaks the step into several graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Stack(2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) < 1e-12:
                continue
            x = layer(x)
        return x.square().mean()


@pytest.mark.filterwarnings("ignore:Not planned, runs as before")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_plain_peak_of_a_step_of_several_graphs_is_that_of_its_code() -> None:
    torch.manual_seed(0)
    model, x = Dropped(), batch()
    measured = measure_once(Dropped(), x).peak_bytes
    optimized = remat.optimize(model, "50x", progress=False)
    for _ in range(4):
        optimized(x).backward()
        model.zero_grad()
    assert len(session_of(optimized).graphs) > 1
    assert remat.plan_of(optimized).plain_peak_bytes == pytest.approx(measured, rel=0.004)


def test_following_the_code_leaves_generators_and_the_model_alone() -> None:
    model, x = Dropped(), batch()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    found = eager_step(model, (x,), {}, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    assert found.peak_bytes() == pytest.approx(measure_once(Dropped(), x).peak_bytes, rel=0.004)
    assert all(parameter.grad is None and not isinstance(parameter, FakeTensor) for parameter in model.parameters())
