"""Levers as the JSON file that `deepspeed.initialize(config=…)` and `deepspeed --deepspeed_config` take.

Autocast goes to DeepSpeed's `torch_autocast`, which keeps fp32 weights as ours does; its `bf16` stores weights in bf16,
with fp32 masters beside them unless told otherwise. Recomputation is no setting of DeepSpeed's: it is told in notes.
"""

from __future__ import annotations

import json

from remat.errors import RematError
from remat.fit.export.exported import Exported, ScriptTarget, plan_note
from remat.fit.levers import Levers, OptimizerKind, Precision, Recomputation, Zero

_CHECKPOINT_NOTE = (
    "DeepSpeed's file does not say what is checkpointed: wrap each block's forward in torch.utils.checkpoint."
)


def write_deepspeed(levers: Levers, subject: ScriptTarget) -> Exported:
    _refuse(levers)
    settings = {
        "train_batch_size": levers.batch,
        "train_micro_batch_size_per_gpu": levers.micro_batch,
        "gradient_accumulation_steps": levers.accumulation,
        "optimizer": _optimizer(levers),
        **_precision(levers),
        "zero_optimization": _zero(levers),
    }
    if levers.optimizer in (OptimizerKind.SGD, OptimizerKind.MOMENTUM) and levers.zero:
        settings["zero_allow_untested_optimizer"] = True
    if levers.offloads_optimizer and not levers.optimizer.is_adam:
        # DeepSpeed has an Adam of its own for the host, and takes no other unless told so.
        settings["zero_force_ds_cpu_optimizer"] = False
    is_by_block = levers.recomputation is Recomputation.PER_BLOCK
    notes = plan_note(levers, "deepspeed.initialize") + ((_CHECKPOINT_NOTE,) if is_by_block else ())
    return Exported(json.dumps(settings, indent=2) + "\n", notes)


def _refuse(levers: Levers) -> None:
    if levers.offloads_optimizer and not levers.zero:
        raise RematError(
            "DeepSpeed offloads the optimizer only together with ZeRO, and these levers have ZeRO-0; export a script, "
            "or choose ZeRO."
        )
    if levers.precision is Precision.PURE_BF16 and not levers.has_masters and not levers.zero:
        raise RematError(
            "DeepSpeed keeps fp32 masters beside bf16 weights unless it shards, and these levers have ZeRO-0 and no "
            "masters; export a script, or choose ZeRO."
        )
    if levers.budget_bytes is not None and levers.zero is Zero.WEIGHTS:
        raise RematError(
            "DeepSpeed's ZeRO-3 gathers weights in hooks inside the model, which a plan cannot hold; export a script, "
            "or choose ZeRO-2."
        )


def _optimizer(levers: Levers) -> dict[str, object]:
    if levers.optimizer.is_adam:
        return {"type": "AdamW", "params": {"lr": 1e-4}}
    momentum = {"momentum": 0.9} if levers.optimizer is OptimizerKind.MOMENTUM else {}
    return {"type": "SGD", "params": {"lr": 1e-4, **momentum}}


def _precision(levers: Levers) -> dict[str, object]:
    if levers.precision.is_autocast:
        dtype = "float16" if levers.precision is Precision.FP16 else "bfloat16"
        return {"torch_autocast": {"enabled": True, "dtype": dtype}}
    if levers.precision is Precision.FP32:
        return {}
    lean = {} if levers.has_masters else {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return {"bf16": {"enabled": True, **lean}}


def _zero(levers: Levers) -> dict[str, object]:
    stage: dict[str, object] = {"stage": int(levers.zero)}
    if levers.offloads_optimizer:
        stage["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        # The script's CPUOffloadPolicy keeps the shards of the weights on the host as well.
        if levers.zero is Zero.WEIGHTS:
            stage["offload_param"] = {"device": "cpu", "pin_memory": True}
    return stage
