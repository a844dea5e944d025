"""transformers' Trainer with `RematCallback`: the same training, within a budget, and nothing of it stays."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.stacks.nets import WORDS, Sentences, small_gpt

import remat
from remat.integrations.transformers import RematCallback
from remat.pytorch._compat.tensors import compiled_call
from remat.pytorch.measure.measure_step import measure_once

pytestmark = [
    pytest.mark.slow,
    # What Trainer's own data loader says where there is no accelerator.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]


def arguments(folder: Path, **options: Any) -> Any:
    chosen = dict(max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2, save_steps=2, eval_steps=2)
    fixed = dict(eval_strategy="steps", logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    return transformers.TrainingArguments(str(folder), **{**chosen, **fixed, **options})


def trainer_in(folder: Path, callbacks: Sequence[Any] = (), kind: Any = None, **options: Any) -> Any:
    return (kind or transformers.Trainer)(
        small_gpt(transformers),
        arguments(folder, **options),
        train_dataset=Sentences(),
        eval_dataset=Sentences(4),
        callbacks=list(callbacks),
    )


def history(trainer: Any) -> list[tuple[Any, ...]]:
    return [
        tuple(entry.get(name) for name in ("loss", "grad_norm", "eval_loss")) for entry in trainer.state.log_history
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return transformers.GPT2LMHeadModel.from_pretrained(folder).state_dict()


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Measuring(transformers.TrainerCallback):
    """Measures a step of the trainer after the last one, on a batch of its own."""

    trainer: Any = None
    peak_bytes = 0
    returned: frozenset[str] = frozenset()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:
        if state.global_step == state.max_steps:
            sentences = Sentences()
            batch = {name: torch.stack([sentences[place][name] for place in range(4)]) for name in sentences[0]}
            self.peak_bytes = measure_once(self._step, model, batch, optimizer).peak_bytes
            self.returned = frozenset(model(**batch))

    def _step(self, model: Any, batch: Any, optimizer: Any) -> None:
        """Takes the optimizer for its state to be counted."""
        self.trainer.training_step(model, batch, torch.tensor(128))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A training without Remat, in bf16 with accumulation, evaluation and checkpoints."""
    trainer = trainer_in(tmp_path_factory.mktemp("plain"), bf16=True)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def planned(budget: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, RematCallback, list[str]]]:
    """The same with Remat, and what the library's log was told."""
    callback, told = RematCallback(budget, time_limit=1.0), list[str]()
    trainer = trainer_in(tmp_path_factory.mktemp("planned"), [callback], bf16=True)
    log, noting = logging.getLogger("transformers.remat"), logging.Handler()
    noting.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(noting)
    log.setLevel(logging.INFO)
    trainer.train()
    log.removeHandler(noting)
    log.setLevel(logging.NOTSET)
    yield trainer, callback, told


def test_losses_gradient_norms_and_evaluations_are_the_same(plain: Any, planned: Any) -> None:
    assert history(planned[0]) == history(plain)
    assert any(entry[2] for entry in history(plain))


def test_predicted_peak_is_within_the_budget(planned: Any) -> None:
    plan = planned[1].plan
    assert plan.predicted_peak <= plan.budget_bytes < plan.plain_peak_bytes


def test_log_is_told_of_the_plan(planned: Any) -> None:
    assert len(planned[2]) == 1 and planned[2][0].startswith("Remat: budget ") and "overhead" in planned[2][0]


def test_checkpoints_load_without_remat_and_hold_the_same_weights(plain: Any, planned: Any) -> None:
    for name in ("checkpoint-2", "checkpoint-4"):
        assert same(weights(Path(plain.args.output_dir) / name), weights(Path(planned[0].args.output_dir) / name))


def test_model_is_as_before_and_generates(plain: Any, planned: Any) -> None:
    model = planned[0].model
    assert compiled_call(model) is None and type(model) is transformers.GPT2LMHeadModel
    start = torch.tensor([[1, 2, 3]])
    options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(start))
    made = model.eval().generate(start, **options)
    assert torch.equal(made, plain.model.eval().generate(start, **options)) and int(made.max()) < WORDS


def test_plan_and_report_lie_beside_the_checkpoints(planned: Any) -> None:
    folder = Path(planned[0].args.output_dir) / "remat"
    assert remat.Plan.load(folder / "plan.json").budget_bytes == planned[1].plan.budget_bytes
    assert (folder / "report.html").stat().st_size > 0


def test_metrics_are_in_the_history(planned: Any) -> None:
    last = [entry for entry in planned[0].state.log_history if "loss" in entry][-1]
    plan = planned[1].plan
    assert (last["remat/peak"], last["remat/overhead"]) == (plan.predicted_peak, plan.overhead)


def test_a_resumed_training_ends_in_the_same_weights(plain: Any, planned: Any, budget: str, tmp_path: Path) -> None:
    callback = RematCallback(budget, time_limit=1.0)
    trainer = trainer_in(tmp_path, [callback], bf16=True)
    trainer.train(resume_from_checkpoint=str(Path(planned[0].args.output_dir) / "checkpoint-2"))
    assert same(trainer.model.state_dict(), plain.model.state_dict())


def test_measured_peak_is_within_the_budget_and_nobody_holds_logits(budget: str, tmp_path: Path) -> None:
    measuring, callback = Measuring(), RematCallback(budget, time_limit=1.0)
    options: Any = dict(max_steps=2, eval_strategy="no", save_strategy="no", gradient_accumulation_steps=1)
    measuring.trainer = trainer_in(tmp_path, [callback, measuring], **options)
    measuring.trainer.train()
    assert callback.plan.predicted_peak * 0.8 < measuring.peak_bytes <= callback.plan.budget_bytes
    assert measuring.returned == {"loss"}


def test_a_trainer_that_reads_logits_gets_them(tmp_path: Path) -> None:
    read = []

    class Reading(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
            read.append(outputs.logits.shape)
            return (loss, outputs) if return_outputs else loss

    options: Any = dict(max_steps=1, eval_strategy="no", save_strategy="no", gradient_accumulation_steps=1)
    trainer_in(tmp_path, [RematCallback("2x", time_limit=1.0)], Reading, **options).train()
    assert read == [(4, 32, WORDS)]


@pytest.mark.parametrize(
    ("compiles", "devices", "words"), [(True, 1, "torch_compile=True"), (False, 2, "DataParallel")]
)
def test_what_trainer_compiles_or_copies_itself_is_refused(compiles: bool, devices: int, words: str) -> None:
    with pytest.raises(remat.RematError, match=words):
        RematCallback("0.7x").on_train_begin(SimpleNamespace(torch_compile=compiles, n_gpu=devices), None, None)
