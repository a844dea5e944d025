"""`remat.doctor` on steps with one thing wrong each: it is found, and told by the user's own line."""

from __future__ import annotations

import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import nn

import remat
from remat.core.results.diagnosis import Diagnosis, Finding, FindingKind

ROWS, WIDTH = 128, 32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.BatchNorm1d(2 * WIDTH), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(self.middle(torch.relu(self.norm(self.first(x)))))).square().mean()

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Prints(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        print("here", file=sys.stderr)
        return x


class Decides(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x


class PrintsInLoop(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.relu(x)
            print("here", file=sys.stderr)
        return self.last(self.first(x)).square().mean()


class Counts(Net):
    calls = 0

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * torch.ones(self.calls).sum()


def rows() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def examined(model: Any, budget: str = "0.95x") -> Diagnosis:
    return remat.doctor(model, rows(), budget=budget)


def only(found: Diagnosis, kind: FindingKind) -> Finding:
    (finding,) = (item for item in found.findings if item.kind is kind)
    return finding


def line_of(words: str) -> str:
    with open(__file__, encoding="utf-8") as source:
        number = next(number for number, line in enumerate(source, 1) if words in line)
    return f"test_doctor.py:{number}"


def test_nothing_wrong() -> None:
    found = examined(Net())
    assert found.ok and found.findings == ()
    assert (found.graphs, found.same_bits, found.covered, found.recaptures) == (1, True, 1.0, 0)
    assert found.predicted_peak_bytes == found.measured_peak_bytes
    assert found.budget_bytes is not None and found.measured_peak_bytes <= found.budget_bytes
    assert found.ops > 5 and found.saved_bytes


def test_step_leaves_everything_as_it_was() -> None:
    model = Net()
    model.last.bias.grad = gradient = torch.ones(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    examined(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.last.bias.grad is gradient and gradient.item() == 1 and model.first.weight.grad is None


def test_print_is_shown_as_it_is_written() -> None:
    found = examined(Prints(), "1.5x")
    assert not found.ok and found.same_bits and found.graphs == 2
    finding = only(found, FindingKind.NOT_TRACED)
    assert finding.what == '`print("here", file=sys.stderr)` runs unplanned: it prints.'
    assert finding.place.endswith(line_of('print("here"'))
    assert finding.advice == "Print after the step, or not at all."


def test_branch_on_a_value_is_told_as_one() -> None:
    finding = only(examined(Decides(), "1.5x"), FindingKind.NOT_TRACED)
    assert "it reads values out of a tensor" in finding.what and "torch.where" in finding.advice
    assert finding.place.endswith(line_of(".item() > 0"))


def test_function_that_is_left_out_whole_leaves_its_layers_planned_one_by_one() -> None:
    found = examined(PrintsInLoop(), "1.5x")
    assert found.graphs == 2
    assert only(found, FindingKind.NOT_TRACED).what.endswith("and with it the whole function around it.")


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_backward_hook_is_named_by_its_module() -> None:
    model = Net()
    model.last.register_full_backward_hook(lambda *_: None)
    finding = only(examined(model, "2x"), FindingKind.NOT_TRACED)
    assert "a hook waits for gradients that pass `last`" in finding.what
    assert finding.advice.startswith("Remove the hook")


def test_forward_hook_that_can_be_traced_is_fine() -> None:
    model = Net()
    model.first.register_forward_hook(lambda module, given, result: result * 2)
    assert not any(item.kind.is_problem for item in examined(model, "1.5x").findings)


def test_budget_too_small_is_told_with_the_smallest_and_the_rest_is_found_out() -> None:
    found = examined(Prints(), "0.05x")
    assert not found.ok and found.same_bits and found.graphs == 2
    finding = only(found, FindingKind.BUDGET)
    assert finding.advice.startswith(f"Give {found.predicted_peak_bytes} bytes (")
    assert "op `" not in finding.what
    assert only(found, FindingKind.NOT_TRACED)


def test_smallest_budget_that_is_told_works() -> None:
    advice = only(examined(Net(), "0.05x"), FindingKind.BUDGET).advice
    assert remat.doctor(Net(), rows(), budget=int(advice.split()[1])).ok


def test_what_changes_from_step_to_step_is_told() -> None:
    found = examined(Counts(), "1.5x")
    assert found.captures == (1, 1, 1, 1) and found.same_bits is None
    finding = only(found, FindingKind.RECAPTURED)
    assert "steps 2, 3, 4" in finding.what and "self.calls" in finding.what
    assert finding.place.endswith(line_of("self.calls += 1"))


def test_function_with_its_optimizer_is_a_step_as_it_is() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = remat.doctor(step, rows(), budget="1.5x")
    assert found.same_bits and found.graphs == 1
    assert not any(item.kind.is_problem for item in found.findings)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state


def test_gradients_of_torch_func_are_no_backward() -> None:
    model = Net().eval()

    def step(x: torch.Tensor) -> torch.Tensor:
        parameters = dict(model.named_parameters())
        gradients = torch.func.grad(lambda values: torch.func.functional_call(model, values, (x,)))(parameters)
        return gradients["last.bias"]

    found = remat.doctor(step, rows(), budget="1.5x")
    assert not found.ok and found.same_bits
    assert "does not go backward" in only(found, FindingKind.LEFT_OUT).what


def test_function_without_backward_is_told_to_have_one() -> None:
    model = Net()
    finding = only(remat.doctor(lambda x: model(x), rows(), budget="1.5x"), FindingKind.LEFT_OUT)
    assert "does not go backward" in finding.what


def test_frozen_model_has_nothing_to_plan() -> None:
    assert "no forward that needs gradients" in only(examined(Net().requires_grad_(False)), FindingKind.LEFT_OUT).what


def test_what_is_no_step_is_refused() -> None:
    with pytest.raises(remat.RematError, match="A str is no step"):
        remat.doctor("model", budget="1x")
