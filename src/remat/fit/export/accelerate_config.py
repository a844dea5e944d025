"""Levers as the YAML file that `accelerate launch --config_file` takes.

The file says how processes start, in which precision and who shards; micro-batches, the optimizer and recomputation
belong to the training code, and are told in notes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from remat.fit.export.exported import Exported, ScriptTarget, offloaded, plan_note
from remat.fit.levers import Levers, Precision, Recomputation, Zero

Settings = Mapping[str, "str | int | bool | Settings"]


def write_accelerate(levers: Levers, subject: ScriptTarget) -> Exported:
    settings: dict[str, str | int | bool | Settings] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(levers),
        "mixed_precision": _precision(levers),
        "num_machines": 1,
        "num_processes": levers.world,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": False,
    }
    if levers.zero.is_sharded:
        settings["fsdp_config"] = fsdp_settings(levers, "fsdp_")
    return Exported("\n".join(_lines(settings)) + "\n", tuple(_notes(levers)))


def fsdp_settings(levers: Levers, prefix: str) -> dict[str, str | int | bool | Settings]:
    """FSDP2 as Accelerate names its parts; transformers takes the same names without `fsdp_`."""
    return {
        f"{prefix}version": 2,
        f"{prefix}auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        f"{prefix}reshard_after_forward": levers.zero is Zero.WEIGHTS,
        f"{prefix}{'offload_params' if prefix else 'cpu_offload'}": levers.offloads_optimizer,
        f"{prefix}activation_checkpointing": levers.recomputation is Recomputation.PER_BLOCK,
        f"{prefix}state_dict_type": "SHARDED_STATE_DICT",
    }


def host_note(levers: Levers) -> Iterator[str]:
    """What no library of these does by a setting: its optimizers on the host, or shared out among replicas."""
    if levers.offloads_optimizer and not levers.zero.is_sharded:
        yield f"The optimizer's state is put on the host in code: `{offloaded(levers)}`."
    if levers.zero is Zero.OPTIMIZER and levers.world > 1:
        yield (
            "ZeRO-1 is not a setting: make the optimizer a torch.distributed.optim.ZeroRedundancyOptimizer over "
            "model.parameters()."
        )
    if levers.precision is Precision.PURE_BF16 and not (levers.has_masters and levers.zero.is_sharded):
        yield "Weights in bf16 are not a setting: call `model.to(torch.bfloat16)` before anything else."


def _distributed_type(levers: Levers) -> str:
    if levers.zero.is_sharded:
        return "FSDP"
    return "MULTI_GPU" if levers.world > 1 else "NO"


def _precision(levers: Levers) -> str:
    # With FSDP2 Accelerate's "bf16" gathers fp32 shards in bf16: the masters that `PURE_BF16` asks for.
    is_gathered = levers.has_masters and levers.zero.is_sharded
    return levers.precision.value if levers.precision.is_autocast else "bf16" if is_gathered else "no"


def _notes(levers: Levers) -> Iterator[str]:
    yield (
        f"Micro-batches are not in Accelerate's file: load {levers.micro_batch} samples at a time, and make "
        f"`Accelerator(gradient_accumulation_steps={levers.accumulation})`."
    )
    yield from host_note(levers)
    if levers.recomputation is Recomputation.PER_BLOCK and not levers.zero.is_sharded:
        yield "Checkpointing is not in Accelerate's file: wrap each block's forward in torch.utils.checkpoint."
    yield from plan_note(levers, "accelerator.prepare")


def _lines(settings: Settings, indent: str = "") -> Iterator[str]:
    """As YAML; JSON's strings, numbers and truths are YAML's too."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{name}: {json.dumps(value)}"
