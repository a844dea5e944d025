"""A profiled step as tables for a terminal, as JSON facts, and in one sentence.

In: a `StepProfile`. Out: `rich` renderables, plain where the output is no terminal, and a dict for `--json`.
"""

from __future__ import annotations

from dataclasses import asdict

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from remat.core.budget import format_bytes
from remat.core.results.profile import BEFORE, MemoryClass, ProfiledStorage, StepProfile
from remat.layout.footprint import footprint
from remat.report.tables.sharing import footprint_facts, sharing_rows

_NONE = "–"
_TEXT_COLUMNS = ("class", "name", "module")
_NUMBER_COLUMNS = ("created", "last use\nforward", "first use\nbackward", "idle", "recompute")


def profile_tables(profile: StepProfile, top: int) -> list[RenderableType]:
    """The summary, what the peak is made of, what sharing saves, the largest storages, and modules."""
    if not profile.ops:
        return [Text(summary(profile) + "\n")]
    return [
        Text(summary(profile) + "\n"),
        breakdown_table(profile),
        sharing_table(profile),
        _storage_table(profile, top),
        module_table(profile, top),
    ]


def summary(profile: StepProfile) -> str:
    """What the peak is, where it is, and what backward's waiting activations have to do with it."""
    if not profile.ops:
        return f"Nothing was computed; {format_bytes(profile.start_bytes)} were in memory when the step began."
    op = profile.ops[profile.peak_op]
    place = f" in `{op.module}`" if op.module else ""
    parts = [f"{share:.0%} {name}" for name, share in _shares(profile)]
    peak = f"Peak {format_bytes(profile.peak_bytes)} during `{short(op.target)}`{place} ({op.phase.value})"
    return f"{peak}: {', '.join(parts)}. {_waiting(profile)}"


def profile_facts(profile: StepProfile, top: int) -> dict[str, object]:
    """The same for programs; the whole profile is in its file."""
    peak = profile.peak_op
    return {
        "name": profile.name,
        "device": profile.device,
        "torch_version": profile.torch_version,
        "seconds": profile.seconds,
        "ops": len(profile.ops),
        "start_bytes": profile.start_bytes,
        "peak_bytes": profile.peak_bytes,
        "reserved_bytes": profile.reserved_bytes,
        "peak_op": None if peak == BEFORE else {"position": peak, **asdict(profile.ops[peak])},
        "breakdown": {kind.value: size for kind, size in profile.breakdown().items()},
        "footprint": footprint_facts(footprint(profile)),
        "storages": [{**asdict(item), "idle_ns": profile.idle_ns(item)} for item in profile.live_at(peak)[:top]],
        "modules": [asdict(row) for row in profile.modules()[:top]],
        "stopped_by": profile.stopped_by,
        "summary": summary(profile),
    }


def short(target: str) -> str:
    """`aten.mm` for `aten.mm.default`."""
    return target.removesuffix(".default")


def _bare(name: str) -> str:
    """`mm` for `aten.mm.default`; other names as they are."""
    return name.split(".")[1] if name.startswith("aten.") else name


def duration(time_ns: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if time_ns >= size:
            return f"{time_ns / size:.3g} {unit}" if time_ns < 999.5 * size else f"{time_ns / size:,.0f} {unit}"
    return f"{time_ns:.0f} ns"


def _shares(profile: StepProfile) -> list[tuple[str, float]]:
    """What the peak is made of, activations that wait for backward apart from the others; nothing below 1 %."""
    parts = {kind.value: float(size) for kind, size in profile.breakdown().items()}
    waiting = sum(item.size_bytes for item in _waiting_at_peak(profile))
    if waiting:
        parts["activations that wait for backward"] = waiting
        parts["other activations"] = parts.pop(MemoryClass.ACTIVATION.value) - waiting
    total = profile.peak_bytes
    rows = [(name, size / total) for name, size in parts.items() if size >= 0.01 * total]
    return sorted(rows, key=lambda row: -row[1])


def _waiting(profile: StepProfile) -> str:
    waiting = _waiting_at_peak(profile)
    if not waiting:
        return "No activation waits for backward there."
    size = sum(item.size_bytes for item in waiting)
    cost = sum(item.recompute_ns for item in waiting)
    step = sum(op.time_ns for op in profile.ops)
    share = f", {cost / step:.0%} of the step" if step > 0 else ""
    return (
        f"The {len(waiting)} activations that wait ({format_bytes(size)}) took {duration(cost)} to compute{share}: "
        "what recomputing them all would cost."
    )


def _waiting_at_peak(profile: StepProfile) -> list[ProfiledStorage]:
    live = profile.live_at(profile.peak_op)
    return [item for item in live if item.kind is MemoryClass.ACTIVATION and item.waits_for_backward]


def breakdown_table(profile: StepProfile) -> Table:
    table = _table(f"{profile.name} on {profile.device}: what the peak is made of")
    table.add_column("class")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    for kind, size in profile.breakdown().items():
        table.add_row(kind.value, format_bytes(size), f"{size / profile.peak_bytes:.1%}")
    table.add_row("peak", format_bytes(profile.peak_bytes), "", style="bold")
    step = f"{len(profile.ops)} ops"
    if profile.seconds:
        step = f"{profile.seconds * 1e3:.1f} ms, {step}"
    table.caption, table.caption_justify = Text(f"step: {step}", style="dim"), "left"
    return table


def sharing_table(profile: StepProfile) -> Table:
    table = _table("What sharing saves")
    table.add_column("")
    table.add_column("bytes", justify="right")
    table.add_column("", style="dim")
    for row in sharing_rows(profile, footprint(profile)):
        table.add_row(*row)
    return table


def _storage_table(profile: StepProfile, top: int) -> Table:
    table = _table("Largest at the peak (positions are ops of the step)")
    for name in ("bytes", *_TEXT_COLUMNS, *_NUMBER_COLUMNS):
        table.add_column(name, justify="left" if name in _TEXT_COLUMNS else "right", overflow="fold")
    for item in profile.live_at(profile.peak_op)[:top]:
        table.add_row(
            format_bytes(item.size_bytes),
            item.kind.value,
            Text(_bare(item.name)),
            Text(item.module),
            _position(item.created, "before"),
            _position(item.last_forward_use),
            _position(item.first_backward_use),
            duration(profile.idle_ns(item)) if item.waits_for_backward else _NONE,
            duration(item.recompute_ns) if item.recompute_ns else _NONE,
        )
    return table


def module_table(profile: StepProfile, top: int) -> Table:
    table = _table("Modules, their parts not included")
    table.add_column("module", overflow="fold")
    for name in ("at peak", "parameters", "waits for\nbackward", "ops", "time"):
        table.add_column(name, justify="right")
    rows = profile.modules()
    for row in rows[:top]:
        table.add_row(
            Text(row.module or "(outside)"),
            format_bytes(row.at_peak_bytes),
            format_bytes(row.parameter_bytes),
            format_bytes(row.activation_bytes),
            str(row.op_count),
            duration(row.time_ns),
        )
    if len(rows) > top:
        table.caption, table.caption_justify = Text(f"and {len(rows) - top} more (--top)", style="dim"), "left"
    return table


def _position(position: int, before: str = _NONE) -> str:
    return before if position == BEFORE else str(position)


def _table(title: str) -> Table:
    # A model's name for itself may look like markup.
    return Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
