"""Lightning with the `Remat` callback: the same fit, within a budget, and nothing of it stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning")

from tests.stacks.nets import Net, samples
from torch.utils.data import DataLoader, TensorDataset

import remat
from remat.integrations.lightning import Remat
from remat.pytorch.measure.measure_step import measure_once

pytestmark = [
    pytest.mark.slow,
    # Lightning's own: it calls a deprecated name of torch, and gives advice on workers and on the logger.
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*The number of training batches.*"),
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0, .tensorboardX. has been removed"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists and is not empty"),
]
BATCH = 256


class Classifier(lightning.LightningModule):
    """Logs a loss, numbers and another tensor in the middle of its step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(*batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"double": 2 * loss, "one": 1.0})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.net(*batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Noting(lightning.Callback):
    """Losses of all steps; after the last one, what such a step needs."""

    def __init__(self, measures: bool = False) -> None:
        self.losses: list[float] = []
        self.peak_bytes = 0
        self._measures = measures

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._measures:
            # Nothing may be logged in this hook.
            pl_module.log = pl_module.log_dict = lambda *_, **__: None
            self.peak_bytes = measure_once(self._step, pl_module, samples(BATCH), trainer.optimizers[0]).peak_bytes

    def _step(self, module: Any, batch: Any, optimizer: Any) -> None:
        """In Lightning's order: gradients of the step before are dropped after the forward."""
        loss = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()


def fitted(folder: Path, *callbacks: Any, epochs: int = 2, resume: Path | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    noting, module = Noting(), Classifier()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[noting, *callbacks],
        **options,
    )
    train, validation = (TensorDataset(*samples(count * BATCH)) for count in (3, 1))
    trainer.fit(module, DataLoader(train, BATCH), DataLoader(validation, BATCH), ckpt_path=resume)
    return trainer, module, noting


def checkpoint(folder: Path) -> Path:
    (found,) = (folder / "checkpoints").glob("*.ckpt")
    return found


def same(first: Any, second: Any) -> bool:
    return all(torch.equal(first.state_dict()[name], value) for name, value in second.state_dict().items())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("plain")
    return (*fitted(folder), folder)


@pytest.fixture(scope="module")
def planned(budget: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, callback = tmp_path_factory.mktemp("planned"), Remat(budget, time_limit=1.0)
    return (*fitted(folder, callback), folder, callback)


def test_losses_and_logged_metrics_are_the_same(plain: Any, planned: Any) -> None:
    assert planned[2].losses == plain[2].losses and len(plain[2].losses) == 6
    logged = {name: value for name, value in planned[0].callback_metrics.items() if not name.startswith("remat/")}
    assert logged == plain[0].callback_metrics and {"loss_step", "loss_epoch", "double", "validation"} <= logged.keys()


def test_logging_does_not_break_the_step(planned: Any) -> None:
    assert len(planned[4].plan.fingerprint.graph_hashes) == 1


def test_predicted_peak_is_within_the_budget(planned: Any) -> None:
    plan = planned[4].plan
    assert plan.predicted_peak <= plan.budget_bytes < plan.plain_peak_bytes


def test_metrics_of_the_plan_are_logged_and_files_stored(planned: Any) -> None:
    plan = planned[4].plan
    assert float(planned[0].callback_metrics["remat/peak"]) == plan.predicted_peak
    assert remat.Plan.load(planned[3] / "remat" / "plan.json").budget_bytes == plan.budget_bytes
    assert (planned[3] / "remat" / "report.html").stat().st_size > 0


def test_checkpoint_loads_without_remat_and_the_module_is_as_before(plain: Any, planned: Any) -> None:
    loaded = Classifier.load_from_checkpoint(checkpoint(planned[3]))
    assert same(loaded, plain[1]) and same(planned[1], plain[1])
    assert "training_step" not in vars(planned[1]) and "log" not in vars(planned[1])


def test_a_resumed_fit_goes_on_as_one_without_remat(plain: Any, planned: Any, budget: str, tmp_path: Path) -> None:
    resumed = fitted(tmp_path / "a", Remat(budget, time_limit=1.0), epochs=3, resume=checkpoint(planned[3]))
    expected = fitted(tmp_path / "b", epochs=3, resume=checkpoint(plain[3]))
    assert resumed[2].losses == expected[2].losses and len(expected[2].losses) == 3


def test_accumulation_in_bf16_is_the_same(budget: str, tmp_path: Path) -> None:
    options = dict(epochs=1, accumulate_grad_batches=2, precision="bf16-mixed", enable_checkpointing=False)
    plain = fitted(tmp_path, **options)
    planned = fitted(tmp_path, Remat(budget, time_limit=1.0), **options)
    assert planned[2].losses == plain[2].losses and same(planned[1], plain[1])


def test_measured_peak_is_within_the_budget(budget: str, tmp_path: Path) -> None:
    callback, noting = Remat(budget, time_limit=1.0), Noting(measures=True)
    fitted(tmp_path, noting, callback, epochs=1, enable_checkpointing=False)
    assert callback.plan.predicted_peak * 0.8 < noting.peak_bytes <= callback.plan.budget_bytes


def test_a_module_that_optimizes_by_itself_is_refused(tmp_path: Path) -> None:
    class Manual(Classifier):
        automatic_optimization = False

    with pytest.raises(remat.RematError, match="automatic_optimization=False"):
        Remat("0.7x").on_fit_start(None, Manual())
