"""One way to train a model: every lever that decides what a rank holds and how long a step takes, in one type.

`Levers` is a plain description that needs neither a model nor torch. `check` refuses what makes no sense, in one
sentence; `is_runnable` tells what `Fit.apply` and the scripts can really set up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from remat.core.budget import format_bytes
from remat.errors import RematError, UnknownName


class Precision(StrEnum):
    """What is computed in, and what weights and gradients are stored in."""

    FP32 = "fp32"
    FP16 = "fp16"
    """Autocast to fp16 with a GradScaler; weights and gradients stay fp32."""
    BF16 = "bf16"
    """Autocast to bf16; weights and gradients stay fp32."""
    PURE_BF16 = "pure-bf16"
    """Weights and gradients are bf16, and so is all that is computed."""

    @property
    def is_autocast(self) -> bool:
        return self in (Precision.FP16, Precision.BF16)

    @property
    def compute_bytes(self) -> int:
        """Of a number in a matrix product."""
        return 4 if self is Precision.FP32 else 2

    @property
    def weight_bytes(self) -> int:
        """Of a number of a weight that the model holds, and of its gradient."""
        return 2 if self is Precision.PURE_BF16 else 4


class OptimizerKind(StrEnum):
    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAMW = "adamw"
    """Beside weights in bf16 it keeps fp32 copies of them, the masters, and its state in fp32."""
    ADAMW_WITHOUT_MASTERS = "adamw-without-masters"
    """State in the dtype of the weights, as torch's AdamW has it; for fp32 weights the same as `ADAMW`."""

    @property
    def states(self) -> int:
        """Tensors as large as the weight that it keeps for each."""
        return {OptimizerKind.SGD: 0, OptimizerKind.MOMENTUM: 1}.get(self, 2)

    @property
    def is_adam(self) -> bool:
        return self in (OptimizerKind.ADAMW, OptimizerKind.ADAMW_WITHOUT_MASTERS)


class Zero(IntEnum):
    """What ranks share out among them, after the stages of ZeRO, and who does it here."""

    REPLICATED = 0
    """Nothing: DistributedDataParallel."""
    OPTIMIZER = 1
    """The optimizer's state: DistributedDataParallel with ZeroRedundancyOptimizer."""
    GRADIENTS = 2
    """Gradients too: fully_shard that keeps gathered weights from forward to backward."""
    WEIGHTS = 3
    """Weights too: fully_shard that frees them after every block."""

    @property
    def is_sharded(self) -> bool:
        """Whether weights lie in shards between the steps."""
        return self >= Zero.GRADIENTS


class Recomputation(StrEnum):
    NONE = "none"
    PER_BLOCK = "per-block"
    """torch.utils.checkpoint around every repeated block."""
    PLANNED = "planned"
    """Remat's plan, within `Levers.budget_bytes`."""


@dataclass(frozen=True, slots=True)
class Levers:
    """One combination. Sizes are of one rank: a step takes `micro_batch` samples `accumulation` times on each."""

    precision: Precision = Precision.FP32
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    zero: Zero = Zero.REPLICATED
    recomputation: Recomputation = Recomputation.NONE
    budget_bytes: int | None = None
    """For `PLANNED`: the peak of the whole step on one rank."""
    offloads_optimizer: bool = False
    """State and masters in host memory: `remat.offload_optimizer`, or CPUOffloadPolicy where weights are sharded."""
    offloads_activations: bool = False
    """What the plan saves may go to the host: `remat.optimize(..., offload="cpu")`."""
    micro_batch: int = 1
    accumulation: int = 1
    pipeline_stages: int = 1
    world: int = 1
    """All ranks; those of one pipeline stage train on parts of the batch."""

    @property
    def replicas(self) -> int:
        """Ranks that see different samples, among which ZeRO shares out."""
        return self.world // self.pipeline_stages

    @property
    def batch(self) -> int:
        """Samples of one step of the whole job."""
        return self.micro_batch * self.accumulation * self.replicas

    @property
    def has_masters(self) -> bool:
        """Whether fp32 weights exist beside those that the model computes with."""
        return self.precision is Precision.PURE_BF16 and self.optimizer is OptimizerKind.ADAMW

    @property
    def steps_in_backward(self) -> bool:
        """Whether an offloaded optimizer updates while backward runs, so that gradients are never all there."""
        return self.offloads_optimizer and self.world == self.accumulation == 1 and not self.has_scaler

    @property
    def has_scaler(self) -> bool:
        return self.precision is Precision.FP16

    def check(self) -> Levers:
        """Itself, or one sentence on what does not go together."""
        for name in ("micro_batch", "accumulation", "pipeline_stages", "world"):
            if getattr(self, name) < 1:
                raise RematError(f"{name} is {getattr(self, name)}; give 1 or more.")
        if self.world % self.pipeline_stages:
            raise RematError(
                f"{self.world} ranks cannot be divided into {self.pipeline_stages} pipeline stages; "
                f"choose stages that divide {self.world}."
            )
        if (self.budget_bytes is not None) != (self.recomputation is Recomputation.PLANNED):
            raise RematError(
                f"Recomputation {self.recomputation.value!r} came with the budget {self.budget_bytes}; a planned one "
                "needs a budget in bytes, and the others take none."
            )
        if self.budget_bytes is not None and self.budget_bytes < 1:
            raise RematError(f"The plan's budget is {self.budget_bytes} bytes; give a number above 0.")
        if self.offloads_activations and self.recomputation is not Recomputation.PLANNED:
            raise RematError(
                f"Activations are offloaded by a plan, and recomputation is {self.recomputation.value!r}; plan it, or "
                "leave them on the device."
            )
        return self

    @property
    def obstacle(self) -> str:
        """Why nothing here can set this up, as one sentence; empty where it can."""
        if self.pipeline_stages > 1:
            return (
                f"The pipeline of {self.pipeline_stages} stages is predicted only; cut the model with "
                "torch.distributed.pipelining, or leave pipelines out."
            )
        if self.has_masters and not (self.zero.is_sharded or self.offloads_optimizer):
            return (
                "fp32 masters beside bf16 weights are kept by fully_shard (ZeRO-2 or 3) or on the host; shard, "
                "offload the optimizer, or compute in bf16 by autocast."
            )
        if self.zero is Zero.OPTIMIZER and self.offloads_optimizer:
            return "ZeroRedundancyOptimizer's state cannot be offloaded; use ZeRO-3, or offload without ZeRO."
        if self.zero is Zero.GRADIENTS and self.offloads_optimizer:
            return "fully_shard offloads weights it gathers anew; with offload use ZeRO-3."
        return ""

    @property
    def is_runnable(self) -> bool:
        """Whether `Fit.apply` and the scripts can set this up, on machines that have so many ranks."""
        return not self.obstacle

    @property
    def label(self) -> str:
        """All of it in a few words, as "bf16, ZeRO-3, plan 20.00 GiB, 4 x 2"."""
        parts = [self.precision.value, self.optimizer.value]
        parts += [f"ZeRO-{int(self.zero)}"] if self.replicas > 1 else []
        if self.recomputation is Recomputation.PER_BLOCK:
            parts.append("checkpoint per block")
        if self.budget_bytes is not None:
            parts.append(f"plan {format_bytes(self.budget_bytes)}")
        parts += ["state on host"] if self.offloads_optimizer else []
        parts += ["activations on host"] if self.offloads_activations else []
        parts += [f"{self.pipeline_stages} stages"] if self.pipeline_stages > 1 else []
        return ", ".join((*parts, f"{self.micro_batch} x {self.accumulation}"))


def accumulation_for(batch: int, micro_batch: int, replicas: int) -> int:
    """How often `replicas` ranks take `micro_batch` samples to make a batch; refused where it does not divide."""
    share, rest = divmod(batch, replicas)
    if rest or not share:
        raise RematError(
            f"A batch of {batch} cannot be divided among {replicas} ranks; choose a multiple of {replicas}."
        )
    if share % micro_batch:
        raise RematError(
            f"{share} samples of each rank cannot be divided into micro-batches of {micro_batch}; choose a divisor."
        )
    return share // micro_batch


ALLOWED = {
    "fp16": "autocast to fp16 with a GradScaler",
    "bf16": "autocast to bf16",
    "pure-bf16": "weights and gradients in bf16",
    "recompute": "checkpointing per block and Remat's plans",
    "offload": "the optimizer's state on the host",
    "offload-activations": "activations on the host",
    "zero": "optimizer state, gradients and weights in shards",
    "accumulate": "several micro-batches a step",
    "pipeline": "the model cut into stages",
}
"""Levers that a search may pull, by the name `--allow` takes."""


def read_allowed(text: str) -> frozenset[str]:
    """`"bf16,zero,recompute"` as a set; a name that is none is refused with the list."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in ALLOWED:
            raise UnknownName(f"No lever is called {name!r}; known are {', '.join(ALLOWED)}.")
    return frozenset(names)
