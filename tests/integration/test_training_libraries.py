"""`remat.doctor` and `remat.verify` take what other libraries train with, as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import nn

import remat

pytestmark = [pytest.mark.filterwarnings("ignore")]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(256, 32, generator=generator), torch.randn(256, 1, generator=generator)


def lightning_module(*, calls_itself: bool = True) -> Any:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = F.mse_loss(self(x) if calls_itself else self.net(x), y)
            self.log("loss", loss)
            return loss

    return Module()


def test_lightning_module_is_examined_through_its_training_step() -> None:
    model = lightning_module()
    found = remat.doctor(model, batch(), budget="1x")
    assert found.ok and found.graphs == 1
    assert remat.verify(model, remat.optimize(model, "1x"), batch()).ok


def test_lightning_module_that_does_not_call_itself_is_told_what_to_optimize() -> None:
    found = remat.doctor(lightning_module(calls_itself=False), batch(), budget="1x")
    (finding,) = (item for item in found.findings if item.kind.is_problem)
    assert "training_step does not call the module itself" in finding.what and "self.net" in finding.advice


def test_trainer_brings_its_batch(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=128, n_positions=64)
    model = transformers.GPT2LMHeadModel(config)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (8, 32))]
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, per_device_train_batch_size=4)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    found = remat.doctor(trainer, budget="0.9x")
    assert found.ok and found.graphs == 1
    assert remat.verify(trainer, remat.optimize(model, "0.9x")).ok
