"""Levers as `TrainingArguments` of transformers, in JSON: `HfArgumentParser(TrainingArguments).parse_json_file(path)`.

Trainer then starts with `torchrun` on as many ranks. What Trainer has no argument for is told in notes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from remat.fit.export.accelerate_config import fsdp_settings, host_note
from remat.fit.export.exported import Exported, ScriptTarget
from remat.fit.levers import Levers, OptimizerKind, Precision, Recomputation


def write_trainer(levers: Levers, subject: ScriptTarget) -> Exported:
    is_gathered = levers.has_masters and levers.zero.is_sharded
    settings: dict[str, object] = {
        "output_dir": "output",
        "per_device_train_batch_size": levers.micro_batch,
        "gradient_accumulation_steps": levers.accumulation,
        "bf16": levers.precision is Precision.BF16 or is_gathered,
        "fp16": levers.precision is Precision.FP16,
        "optim": "adamw_torch" if levers.optimizer.is_adam else "sgd",
    }
    if levers.optimizer is OptimizerKind.MOMENTUM:
        settings["optim_args"] = "momentum=0.9"
    if levers.zero.is_sharded:
        settings |= {"fsdp": True, "fsdp_config": fsdp_settings(levers, "")}
    elif levers.recomputation is Recomputation.PER_BLOCK:
        settings |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    return Exported(json.dumps(settings, indent=2) + "\n", tuple(_notes(levers)))


def _notes(levers: Levers) -> Iterator[str]:
    yield from host_note(levers)
    if levers.budget_bytes is not None:
        offload = ', offload="cpu"' if levers.offloads_activations else ""
        yield (
            "The plan is not an argument: give Trainer "
            f"`callbacks=[remat.integrations.transformers.RematCallback(budget={levers.budget_bytes}{offload})]`."
        )
