"""TRL's SFTTrainer, with and without LoRA, within a budget.

TRL computes its loss over chunks of the vocabulary, by code that writes into buffers of its own and that no tracer
follows: the step breaks there, and the loss's own memory is measured and reserved.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

from tokenizers import Tokenizer, models, pre_tokenizers

from remat.integrations.transformers import RematCallback
from remat.pytorch.measure.measure_step import measure_once

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
    # The first steps, before the break at TRL's loss is known.
    pytest.mark.filterwarnings(
        "ignore:Not planned, runs as before. Attempted to call op with non-contiguous:UserWarning"
    ),
    # Dynamo looks at every tensor that enters a graph after a break, and hides what torch says to it; not from errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:An output that mostly has no gradient received one:UserWarning"),
]
WORDS = [f"w{number}" for number in range(60)]


@pytest.fixture(autouse=True)
def chunks_of_a_small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's chunks are for large vocabularies: here one alone would take more than the model."""
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 64)


def tokenizer() -> Any:
    known = {word: place for place, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def texts() -> Any:
    chosen = random.Random(0)
    return datasets.Dataset.from_dict({"text": [" ".join(chosen.choices(WORDS, k=30)) for _ in range(16)]})


def llama() -> Any:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.LlamaConfig(
        vocab_size=63, num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=1, **sizes
    )
    return transformers.LlamaForCausalLM(config)


def trained(folder: Path, *callbacks: Any, lora: bool = False, checkpointing: bool = False) -> Any:
    chosen: Any = dict(max_steps=4, per_device_train_batch_size=4, max_length=32, gradient_checkpointing=checkpointing)
    fixed: Any = dict(logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False, disable_tqdm=True)
    trainer = trl.SFTTrainer(
        llama(),
        args=trl.SFTConfig(str(folder), **chosen, **fixed),
        train_dataset=texts(),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]) if lora else None,
    )
    for callback in callbacks:
        if isinstance(callback, Measuring):
            callback.trainer = trainer
    trainer.train()
    return trainer


class Measuring(transformers.TrainerCallback):
    """Measures the last step of the training."""

    trainer: Any = None
    peak_bytes = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **_: Any) -> None:
        if state.global_step == state.max_steps - 1:
            step, losses = self.trainer.training_step, []

            def measured(model: Any, *batch: Any, **options: Any) -> Any:
                def run(model: Any, batch: Any, optimizer: Any) -> None:
                    """Takes the optimizer for its state to be counted."""
                    losses.append(step(model, *batch, **options))

                self.peak_bytes = measure_once(run, model, batch, optimizer).peak_bytes
                return losses.pop()

            self.trainer.training_step = measured


def history(trainer: Any) -> list[tuple[Any, ...]]:
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy")
    return [tuple(entry.get(name) for name in names) for entry in trainer.state.log_history]


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.long)], ids=["full", "lora"])
def test_losses_and_metrics_are_the_same_within_the_budget(lora: bool, budget: str, tmp_path: Path) -> None:
    plain, callback = trained(tmp_path / "plain", lora=lora), RematCallback(budget, time_limit=1.0)
    measuring = Measuring()
    planned = trained(tmp_path / "planned", measuring, callback, lora=lora, checkpointing=True)
    assert history(planned) == history(plain)
    assert callback.plan.predicted_peak <= callback.plan.budget_bytes < callback.plan.plain_peak_bytes
    assert 0.7 * callback.plan.predicted_peak < measuring.peak_bytes <= callback.plan.budget_bytes
    assert planned.model.is_gradient_checkpointing, "on again, as the configuration says"
