"""Training libraries whose steps run out of memory now and then: the same losses as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
lightning = pytest.importorskip("lightning")
pytest.importorskip("accelerate")

from tests.stacks.nets import Sentences, samples, small_gpt
from tests.stacks.test_lightning import Classifier
from tests.support.memory_faults import OutOfMemoryAt
from torch.utils.data import DataLoader, TensorDataset

from remat.integrations.lightning import Remat
from remat.integrations.transformers import RematCallback

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0, .tensorboardX. has been removed"),
    pytest.mark.filterwarnings("ignore:A training step ran out of memory:UserWarning"),
]
PLACES = {3: 20, 4: 70, 5: 110}
"""At which op a step fails, by the number of the step: forward, and backward."""


class _Faults:
    """A mode while a step runs."""

    def __init__(self, places: dict[int, int]) -> None:
        self.places, self.raised = places, 0
        self._mode: Any = None

    def begin(self, step: int) -> None:
        if step in self.places:
            self._mode = OutOfMemoryAt(self.places[step])
            self._mode.__enter__()

    def end(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self.raised += self._mode.raised
            self._mode = None


class TrainerFaults(transformers.TrainerCallback, _Faults):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.end()


class LightningFaults(lightning.Callback, _Faults):
    def __init__(self, places: dict[int, int]) -> None:
        super().__init__(places)
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.begin(batch_idx)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        # After what Lightning does for the log, which is not guarded.
        if trainer.fit_loop.batch_idx != 3:
            self.begin(trainer.fit_loop.batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.end()
        self.losses.append(float(outputs["loss"]))


def trained(folder: Path, budget: str, places: dict[int, int]) -> tuple[list[Any], int]:
    faults = TrainerFaults(places)
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=7,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = transformers.Trainer(
        small_gpt(transformers), arguments, train_dataset=Sentences(), callbacks=[RematCallback(budget), faults]
    )
    trainer.train()
    return [entry.get("loss") for entry in trainer.state.log_history], faults.raised


def test_trainer_goes_on(budget: str, tmp_path: Path) -> None:
    expected, _ = trained(tmp_path / "calm", budget, {})
    found, raised = trained(tmp_path / "faulty", budget, PLACES)
    assert raised == len(PLACES)
    assert found == expected


def fitted(folder: Path, budget: str, places: dict[int, int]) -> tuple[list[float], float, int]:
    torch.manual_seed(0)
    faults = LightningFaults(places)
    trainer = lightning.Trainer(
        default_root_dir=folder,
        max_epochs=1,
        accelerator="cpu",
        callbacks=[Remat(budget), faults],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    trainer.fit(module, DataLoader(TensorDataset(*samples(8 * 256)), batch_size=256))
    return faults.losses, float(trainer.callback_metrics["loss_epoch"]), faults.raised


def test_lightning_goes_on_and_logs_each_step_once(budget: str, tmp_path: Path) -> None:
    *expected, _ = fitted(tmp_path / "calm", budget, {})
    *found, raised = fitted(tmp_path / "faulty", budget, {3: 10, 4: 5, 5: 15})
    assert raised == 3
    assert found == expected
