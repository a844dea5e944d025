"""What a training step needs, on this machine's device or on one of the catalogue, found on fake tensors.

In: a model with its batch (real, on "meta" or fake), an optimizer, autocast's dtype, a device's name. Forward, backward
and the optimizer run twice on fake copies; the second time, when the optimizer has its state, they are followed.
Out: an `Estimate`. No activation, gradient or state is allocated, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from remat.core.devices import Device, DeviceKind, find_device, known_devices
from remat.core.memory_rules import memory_rules
from remat.core.results.estimate import Estimate
from remat.errors import CaptureError, RematError
from remat.integrations.masks import masks_without_positions
from remat.pytorch._compat.fakes import DATA_DEPENDENT, true_sizes_of_fused_layers
from remat.pytorch.costs.fake_copies import FakeCopies
from remat.pytorch.costs.roofline import RATES
from remat.pytorch.estimate.cuda_rules import cuda_rules
from remat.pytorch.estimate.fake_costs import FakeClock, FakeLedger, OwnClock
from remat.pytorch.measure.clocks import WallClock
from remat.pytorch.measure.follow import Follower
from remat.pytorch.measure.ledger import StorageLedger
from remat.pytorch.measure.profile_step import stop_sentence
from remat.pytorch.measure.training_step import TrainingStep, make_optimizer, precision_of
from remat.pytorch.reach import reachable_from


def estimate(
    model: nn.Module,
    *args: Any,
    optimizer: str | Optimizer | None = None,
    amp: str | None = None,
    gpu: str | None = None,
    devices: Iterable[str | Path] = (),
    **kwargs: Any,
) -> Estimate:
    """The peak and time of training `model(*args, **kwargs)` for one step, and whether `gpu` can hold it.

    `optimizer` is a name as "adamw" or an optimizer of the model's; without one the step is forward and backward.
    `amp` is "bf16" or "fp16". Without `gpu` the step is estimated for the device that the model is on, where some ops
    are tried out; `devices` are files that describe more devices.
    """
    if not isinstance(model, nn.Module):
        raise RematError(f"An estimate needs a module, got {type(model).__name__}; pass the model and its batch.")
    precision = precision_of(amp or "none")
    target = target_of(model, gpu, devices)
    copies = FakeCopies(home_of(model), target.fakes)
    batch = copies.of_arguments((args, kwargs))
    fake = copies.of_model(model)
    updater = _optimizer(optimizer, copies, fake, target)
    step = TrainingStep(fake, batch[0], batch[1], updater, precision)
    clock = target.clock()
    with copies.mode, torch.enable_grad():
        if updater is not None:
            follow_step(step, target, Follower(StorageLedger(target.fakes), WallClock(), [fake]))
        follower = Follower(target.ledger(clock), clock, [fake])
        follow_step(step, target, follower)
    seconds = sum(clock.times_ns()) / 1e9
    profile = follower.profile(type(model).__name__, target.device.name, seconds, is_estimate=True)
    return Estimate(
        profile=profile,
        device=target.device,
        optimizer="" if updater is None else type(updater).__name__,
        amp="" if amp is None or precision is None else amp,
    )


MATMUL_THREADS = 2
"""The matrix library has a workspace for each: forward runs in the caller's, backward in one of autograd's."""


@dataclass(frozen=True, slots=True)
class EstimateTarget:
    """The device asked for, and the one whose fake tensors stand in for it."""

    device: Device
    fakes: torch.device
    is_own: bool

    @property
    def acts_as_cuda(self) -> bool:
        """Whether CPU tensors have to be treated as a GPU's."""
        return self.device.kind is DeviceKind.CUDA and self.fakes.type == "cpu"

    def rules(self) -> AbstractContextManager[None]:
        return cuda_rules(self.device) if self.acts_as_cuda else nullcontext()

    def clock(self) -> FakeClock:
        return OwnClock(self.device, self.fakes) if self.is_own else FakeClock(self.device)

    def ledger(self, clock: FakeClock) -> FakeLedger:
        step_bytes = memory_rules(self.device.kind.value).size_step_bytes
        return FakeLedger(self.fakes, clock, step_bytes, MATMUL_THREADS * self.device.matmul_workspace_bytes)


def follow_step(step: TrainingStep, target: EstimateTarget, follower: Follower) -> None:
    """Run the step once; what it raises becomes one sentence."""
    follower.expect(reachable_from(step))
    try:
        with (
            target.rules(),
            true_sizes_of_fused_layers(),
            masks_without_positions(step.model, step.args, step.kwargs),
            follower.following(),
        ):
            step()
    except RematError:
        raise
    except Exception as error:
        raise CaptureError(_sentence(follower, error)) from error


def _sentence(follower: Follower, error: Exception) -> str:
    op, module = follower.failure(error)
    if not isinstance(error, DATA_DEPENDENT):
        return f"{stop_sentence(follower, error)}; run the step without Remat first."
    return (
        f"The step cannot be estimated: `{op}` of module `{module}` depends on the values of a tensor, and fake ones "
        "have none; leave that branch out for the estimate, or profile a real step instead."
    )


def target_of(model: nn.Module, gpu: str | None, files: Iterable[str | Path]) -> EstimateTarget:
    """Where the device asked for is this machine's, its kernels can be tried; otherwise they are known by rule."""
    catalogue = known_devices(Path(file) for file in files)
    chosen = None if gpu is None else find_device(gpu, catalogue)
    is_cuda = home_of(model) == "cuda"
    if torch.cuda.is_available() and (is_cuda or chosen is not None):
        card, like = _own_card(catalogue.values())
        if chosen in (None, like):
            return EstimateTarget(card, torch.device("cuda", torch.cuda.current_device()), is_own=True)
    if chosen is None:
        return EstimateTarget(catalogue["cpu"], torch.device("cpu"), is_own=True)
    if is_cuda and chosen.kind is DeviceKind.CUDA and torch.cuda.is_available():
        return EstimateTarget(chosen, torch.device("cuda", torch.cuda.current_device()), is_own=False)
    return EstimateTarget(chosen, torch.device("cpu"), is_own=chosen.kind is DeviceKind.CPU)


def home_of(model: nn.Module) -> str:
    """The kind of device that the model is on."""
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    return "cuda" if "cuda" in kinds else "cpu"


def _own_card(catalogue: Iterable[Device]) -> tuple[Device, Device | None]:
    """The card in use, with its own memory, and the entry of the catalogue that its name contains."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    name = properties.name.lower().replace(" ", "")
    known = [item for item in catalogue if all(part in name for part in item.name.lower().split("-"))]
    like = max(known, key=lambda item: len(item.name), default=None)
    rates = RATES["cuda"]
    unknown = Device("", DeviceKind.CUDA, 0, rates.bytes_per_ns, (("fp32", rates.flops_per_ns),))
    return replace(like or unknown, name=properties.name, memory_bytes=properties.total_memory), like


def _optimizer(
    chosen: str | Optimizer | None, copies: FakeCopies, fake: nn.Module, target: EstimateTarget
) -> Optimizer | None:
    with copies.mode:
        given = isinstance(chosen, Optimizer)
        made = copies.of_optimizer(chosen) if given else make_optimizer(chosen or "none", fake)
    for group in made.param_groups if made is not None and target.acts_as_cuda else ():
        # On CUDA, torch updates all parameters at once unless told otherwise, with temporaries as large as they are.
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    return made
