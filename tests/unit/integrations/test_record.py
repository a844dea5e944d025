"""What is told of a plan to a training library, and that it never ends a training."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import remat
from remat.integrations.record import PlanRecord


def followed(folder: Path) -> PlanRecord:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    step = remat.optimize(lambda x: model(x).mean(), "1x")
    step(torch.randn(16, 8)).backward()
    record = PlanRecord(folder)
    record.follow(step)
    return record


def test_plan_is_told_once_and_stored(tmp_path: Path) -> None:
    record = followed(tmp_path)
    assert record.news().startswith("Remat: budget ") and not record.news()
    assert (tmp_path / "remat" / "plan.json").exists()


def test_folder_that_cannot_be_written_is_a_warning_once(tmp_path: Path) -> None:
    (tmp_path / "remat").write_text("in the way")
    record = followed(tmp_path)
    with pytest.warns(UserWarning, match="training goes on without a copy"):
        record.news()
    record.store()
    assert (tmp_path / "remat").read_text() == "in the way"
