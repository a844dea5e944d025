"""An estimate as tables and words for a terminal, and as facts for programs.

In: an `Estimate`, and the devices to choose from where it does not fit. Out: `rich` renderables, plain where the output
is no terminal, and a dict for `--json`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from remat.core.budget import format_bytes
from remat.core.devices import Device, smallest_that_holds
from remat.core.results.estimate import Estimate
from remat.core.results.profile import BEFORE, MemoryClass, Phase
from remat.report.tables.profile import breakdown_table, duration, module_table, short

_MUCH = 0.05
"""Optimizer temporaries of this share of the peak are worth a word."""


def estimate_tables(estimate: Estimate, target: str, devices: Collection[Device], top: int) -> list[RenderableType]:
    return [
        _facts_table(estimate, target),
        breakdown_table(estimate.profile),
        module_table(estimate.profile, top),
        Text(verdict(estimate, devices) + "\n"),
    ]


def estimate_facts(estimate: Estimate, target: str, devices: Collection[Device], top: int) -> dict[str, object]:
    holder = smallest_that_holds(estimate.peak_bytes, devices)
    return {
        "target": target,
        "device": estimate.device.name,
        "optimizer": estimate.optimizer,
        "amp": estimate.amp,
        "peak": estimate.peak_bytes,
        "device_bytes": estimate.device.usable_bytes,
        "fits": estimate.fits,
        "margin": estimate.margin_bytes,
        "fixed": estimate.fixed_bytes,
        "offload": estimate.offload_bytes,
        "seconds": estimate.seconds,
        "ops": len(estimate.profile.ops),
        "breakdown": {kind.value: size for kind, size in estimate.breakdown.items()},
        "modules": [asdict(row) for row in estimate.profile.modules()[:top]],
        "smallest_device": None if holder is None else holder.name,
        "verdict": verdict(estimate, devices),
    }


def verdict(estimate: Estimate, devices: Collection[Device]) -> str:
    """Whether it fits, and what to do where it does not."""
    name, peak = estimate.device.name, format_bytes(estimate.peak_bytes)
    room = format_bytes(estimate.device.usable_bytes)
    if estimate.fits:
        share = estimate.margin_bytes / estimate.device.usable_bytes
        return f"It fits {name}: {peak} of {room}, {format_bytes(estimate.margin_bytes)} ({share:.0%}) to spare."
    words = [f"It does not fit {name}: {peak} needed, {room} there.", _holder(estimate, devices), _remedy(estimate)]
    return " ".join(word for word in (*words, _temporaries(estimate)) if word)


def _holder(estimate: Estimate, devices: Collection[Device]) -> str:
    holder = smallest_that_holds(estimate.peak_bytes, devices)
    if holder is None:
        return "No known device holds it alone."
    return f"The smallest known device that does is {holder.name} ({format_bytes(holder.memory_bytes)})."


def _remedy(estimate: Estimate) -> str:
    """What recomputation could do: it shrinks activations and nothing else."""
    activations = estimate.breakdown.get(MemoryClass.ACTIVATION, 0)
    fixed = format_bytes(estimate.fixed_bytes)
    share = f"Activations are {format_bytes(activations)} ({activations / estimate.peak_bytes:.0%}) of the peak"
    if estimate.fixed_bytes < estimate.device.usable_bytes:
        remedy = f"{share}, which Remat can shrink; the rest needs {fixed}: try remat plan with a budget."
        return remedy + _copies(estimate)
    return (
        f"{share}; the rest needs {fixed} by itself, so recomputation is not enough: shard it or choose a smaller one."
    )


def _copies(estimate: Estimate) -> str:
    """What copies to the host could do beside that."""
    if not estimate.offload_bytes:
        return ""
    most = format_bytes(estimate.offload_bytes)
    return f" With --offload cpu, up to {most} of them can be on the host at a time, behind a step of this length."


def _temporaries(estimate: Estimate) -> str:
    """The optimizer's temporaries, where they make the peak."""
    profile = estimate.profile
    held = estimate.breakdown.get(MemoryClass.WORKSPACE, 0)
    if profile.peak_op == BEFORE or profile.ops[profile.peak_op].phase is not Phase.OPTIMIZER:
        return ""
    if held < _MUCH * estimate.peak_bytes:
        return ""
    return f"The optimizer's update takes {format_bytes(held)} for a moment; fused=True avoids that."


def _facts_table(estimate: Estimate, target: str) -> Table:
    table = Table(title=Text(target), box=box.SIMPLE, show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="dim")
    table.add_column()
    device = estimate.device
    fits = "[green]fits[/]" if estimate.fits else "[red]does not fit[/]"
    table.add_row("device", Text(f"{device.name}, {format_bytes(device.usable_bytes)} for tensors"))
    table.add_row("step", Text(_step(estimate)))
    table.add_row("peak", f"{format_bytes(estimate.peak_bytes)}, {fits}")
    table.add_row("at the peak", Text(_place(estimate)))
    table.add_row("step time", f"{duration(estimate.seconds * 1e9)}, by roofline")
    if estimate.offload_bytes:
        table.add_row("offload", f"up to {format_bytes(estimate.offload_bytes)} of activations for no time")
    return table


def _step(estimate: Estimate) -> str:
    parts = ["forward, backward"]
    parts += [f"{estimate.optimizer} update"] if estimate.optimizer else []
    parts += [f"{estimate.amp} autocast"] if estimate.amp else []
    return f"{', '.join(parts)}: {len(estimate.profile.ops)} ops"


def _place(estimate: Estimate) -> str:
    profile = estimate.profile
    if profile.peak_op == BEFORE:
        return "before the step"
    op = profile.ops[profile.peak_op]
    return f"{short(op.target)}{f' of {op.module}' if op.module else ''} ({op.phase.value})"
