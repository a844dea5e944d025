"""How large a batch fits, three ways side by side, as a table and a sentence.

In: a `MaxBatch`. Out: `rich` renderables.
"""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from remat.core.budget import format_bytes
from remat.core.results.max_batch import Limit, MaxBatch

_NOTHING = "–"


def max_batch_table(found: MaxBatch) -> Table:
    title = f"largest {found.axis} of {found.name} on {found.device} within {format_bytes(found.budget_bytes)}"
    table = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column("")
    for name in (found.axis, "against plain", "peak there", "time over plain"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    table.add_row("plain", *_cells(found, found.plain), "predicted")
    blocks = "per-block checkpointing"
    if found.checkpointed is None:
        table.add_row(blocks, _NOTHING, _NOTHING, _NOTHING, _NOTHING, "no repeated blocks are known")
    else:
        table.add_row(blocks, *_cells(found, found.checkpointed), "predicted")
    ours = f"Remat, offload to {found.offload}" if found.offload else "Remat"
    table.add_row(ours, *_cells(found, found.ours), _confirmation(found), style="bold")
    return table


def max_batch_sentence(found: MaxBatch) -> str:
    """What it comes down to, in words."""
    plain, size = found.plain.size, found.size
    others = max(plain, found.checkpointed.size if found.checkpointed is not None else 0)
    if size <= others:
        gain = f"Remat gains nothing here: {size}, where {others} fits without it."
    elif plain:
        gain = f"A {found.axis} of {size} fits with Remat, {found.gain:.2f} times the {plain} that fits plainly."
    else:
        gain = f"A {found.axis} of {size} fits with Remat; plainly not even {found.grid} does."
    note = f" Sizes were captured one by one, because {found.note}." if found.note else ""
    return gain + note


def _cells(found: MaxBatch, limit: Limit) -> tuple[str, str, str, str]:
    if not limit.size:
        return f"below {found.grid}", _NOTHING, _NOTHING, _NOTHING
    ratio = f"{limit.size / found.plain.size:.2f}x" if found.plain.size else _NOTHING
    return str(limit.size), ratio, format_bytes(limit.peak_bytes), f"{limit.overhead:.1%}"


def _confirmation(found: MaxBatch) -> str:
    if found.measured_peak_bytes is None:
        return "predicted"
    before = "as predicted" if found.predicted == found.size else f"predicted {found.predicted}"
    return f"{before}; measured {format_bytes(found.measured_peak_bytes)}"
