"""Plans of compiled steps are plans: made ahead, kept as files, and run later without being solved for."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat.core.results.profile import Phase
from remat.errors import CaptureError
from remat.pytorch.run.optimize import session_of
from remat.report import write_report

WIDTH, VOCABULARY = 32, 512


class Net(nn.Module):
    """Blocks that can be made again, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.hidden(x)), y)


class LossOutside(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(x))


class Language(nn.Module):
    """Hardly anything but a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(2048, WIDTH), nn.Linear(WIDTH, 2048, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.embedding(tokens))), labels)


def make(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return kind()


def batch(rows: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(VOCABULARY, (rows,), generator=generator)


def trained(step: Any, model: nn.Module, data: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss = step(*data)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def refuse(*args: Any, **options: Any) -> Any:
    raise AssertionError("a plan that is there is not solved for")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan made ahead of time, as a file."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    model = make()
    made = remat.plan(model, *batch(), budget="0.7x", compiler="inductor", time_limit=2)
    assert all(parameter.grad is None for parameter in model.parameters()), "the step does not run"
    made.save(path)
    assert remat.Plan.load(path) == made
    return path


def test_plan_from_a_file_runs_without_being_solved_for(planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, data = remat.Plan.load(planned), batch()
    model = make()
    plain = copy.deepcopy(model)
    monkeypatch.setattr("remat.inductor.model.choose.solve", refuse)
    monkeypatch.setattr("remat.inductor.decide.choose", refuse)
    step = remat.apply(model, plan)
    for _ in range(2):
        found = trained(step, model, data)
    for one, other in zip(found, trained(plain, plain, data), strict=True):
        torch.testing.assert_close(one, other)
    assert remat.plan_of(step) == plan
    model.zero_grad()
    assert remat.measure(lambda: step(*data).backward()).peak_bytes <= plan.budget_bytes + sum(
        parameter.nbytes for parameter in model.parameters()
    )


def test_plan_says_what_its_code_is_made_of(planned: Path) -> None:
    plan = remat.Plan.load(planned)
    assert plan.compiled is not None and plan.compiled.saved and plan.predicted_time > 0
    assert plan.predicted_peak <= plan.budget_bytes < plan.plain_peak_bytes
    assert "blocks.1" in str(plan.explain("blocks.1"))
    assert {row.solver for row in plan.compare().rows} >= {"full", "none"}


def test_report_shows_the_kernels_of_the_code(planned: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    plan = remat.Plan.load(planned)
    step = plan.compiled.step if plan.compiled is not None else None
    assert step is not None and step.peak_bytes == plan.predicted_peak
    assert {op.phase for op in step.ops} >= {Phase.FORWARD, Phase.BACKWARD}
    assert any("fused" in op.target for op in step.ops)
    page = write_report(tmp_path / "report.html", plan).read_text()
    assert "extern_kernels.mm" in page


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"torch_version": "1.0"}, "another torch version"),
        ({"device": "an abacus"}, "another device"),
        ({"graph_hashes": ("0" * 64,)}, "another model"),
    ],
)
def test_plan_for_something_else_is_told_and_the_step_runs(planned: Path, change: dict[str, Any], what: str) -> None:
    plan, data, model = remat.Plan.load(planned), batch(), make()
    other = replace(plan, fingerprint=replace(plan.fingerprint, **change))
    step = remat.apply(model, other)
    with pytest.warns(UserWarning, match=f"made for {what}.* planned for the same"):
        trained(step, model, data)
    made = remat.plan_of(step)
    assert made.budget_bytes == plan.budget_bytes and made.fingerprint == plan.fingerprint


def test_step_whose_loss_is_outside_is_planned_while_it_runs() -> None:
    with pytest.raises(CaptureError, match=r"take remat\.plan_of\(step\)"):
        remat.plan(make(LossOutside), *batch(64), budget="64MiB", compiler="inductor")


@pytest.mark.long
def test_losses_in_chunks_are_part_of_the_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = tuple(torch.randint(0, 2048, (4096,), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    made = remat.plan(Language(), *data, budget="0.3x", compiler="inductor", time_limit=2)
    assert made.compiled is not None and made.compiled.loss_chunks
    made.save(tmp_path / "plan.json")
    monkeypatch.setattr("remat.inductor.decide.choose", refuse)
    model = Language()
    step = remat.apply(model, remat.Plan.load(tmp_path / "plan.json"))
    trained(step, model, data)
    assert [item.chunks for item in session_of(step).graphs[0].form.chunked] == list(made.compiled.loss_chunks)
