"""`remat.profile`: what it returns, what it leaves alone, and what it keeps of a step that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.support.nets import batch, stack
from torch import nn

import remat
from remat.core.results.profile import MemoryClass, Phase


class Failing(nn.Module):
    """Three layers and then whatever `how` says."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.last = nn.Linear(5, 4)
        self.how = how

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.how(self, x)


class OutOfMemoryInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.")


def raise_key_error(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    raise KeyError("labels")


def test_module_is_run_forward_backward_and_by_its_optimizer() -> None:
    model = stack()
    found = remat.profile(model, batch(), optimizer=torch.optim.AdamW(model.parameters()))
    assert [phase for phase in Phase if any(op.phase is phase for op in found.ops)] == list(
        dict.fromkeys(op.phase for op in found.ops)
    )
    assert {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER} <= {op.phase for op in found.ops}
    assert found.seconds > 0
    assert found.name == "Loss"
    # The state was there when the followed step began: a step before had made it.
    assert all(item.created < 0 for item in found.storages if item.kind is MemoryClass.OPTIMIZER_STATE)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_function_is_run_as_it_is_and_its_gradients_stay() -> None:
    model = stack()

    def step(x: torch.Tensor) -> None:
        model.zero_grad()
        model(x).backward()

    found = remat.profile(step, batch())
    assert found.name == "step"
    assert all(parameter.grad is not None for parameter in model.parameters())
    # The old gradients are gone when forward begins.
    assert found.peak_bytes == remat.measure(model, batch()).peak_bytes


def test_generator_ends_where_one_step_leaves_it() -> None:
    model, x = stack(dropout=0.5), batch()
    torch.manual_seed(7)
    model(x).backward()
    expected = torch.get_rng_state()
    torch.manual_seed(7)
    remat.profile(model, x)
    assert torch.equal(torch.get_rng_state(), expected)


def test_optimizer_beside_a_function_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(remat.RematError, match="goes with a module"):
        remat.profile(lambda: None, optimizer=optimizer)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda model, x: model.last(x), r"in `aten.addmm.default` of module `last` after 4 ops: RuntimeError: mat1"),
        (raise_key_error, r"between ops of the model itself after 3 ops: KeyError: 'labels'"),
        (lambda model, x: x.detach(), "Nothing that Failing returned has a gradient; return a loss"),
        (lambda model, x: "loss", "Failing returned str, in which there is no tensor"),
        (lambda model, x: OutOfMemoryInBackward.apply(x).sum(), "OutOfMemoryError: Tried to allocate 20.00 GiB."),
    ],
)
def test_step_that_fails_says_where_and_keeps_what_was_learnt(how: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(remat.ProfileStopped, match=message) as caught:
        remat.profile(Failing(how), batch())
    kept = caught.value.profile
    assert kept.stopped_by == str(caught.value)
    assert [op.module for op in kept.ops[:3]] == ["layers.0", "layers.1", "layers.2"]
    kept.save(tmp_path / "part.json")
    assert remat.StepProfile.load(tmp_path / "part.json") == kept


def test_running_out_of_memory_inside_an_op_names_it() -> None:
    model = Failing(lambda model, x: model.layers[1](x).new_empty(2**60))
    with pytest.raises(remat.ProfileStopped, match=r"in `aten.new_empty.default` of the model itself"):
        remat.profile(model, batch())
