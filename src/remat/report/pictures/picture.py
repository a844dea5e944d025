"""A picture of memory over one training step, plain and under a budget, on one scale.

In: two sequences of live bytes, one number for each moment of the step. Out: a PNG or SVG file, by its suffix.
Long sequences are thinned to the largest value of each stretch, so that no peak is lost.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from remat.core.budget import format_bytes
from remat.core.document import write_bytes
from remat.errors import MissingExtra, RematError, UnknownName

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = ("png", "svg")
_POINTS = 1200
_NEEDS = "Pictures are drawn with matplotlib; install `remat[report]`."
INK, _FAINT = "#1f2933", "#9aa5b1"
MUTED = "#52606d"
_BEFORE, _AFTER, LIMIT = "#8d99a6", "#0b7285", "#c92a2a"


@dataclass(frozen=True, slots=True)
class Scale:
    """The unit of the memory axis."""

    unit: str
    size_bytes: int


def draw_memory(
    path: str | Path,
    *,
    name: str,
    before: Sequence[int],
    after: Sequence[int],
    budget_bytes: int,
    moments: str = "operators run",
) -> Path:
    """Draw both curves with the budget as a line; the title says what was saved. `moments` names what is counted."""
    path = Path(path)
    axes = open_axes(path, (0.075, 0.125, 0.905, 0.69))
    scale = choose_scale(max((*before, *after, budget_bytes, 1)))
    _draw_curves(axes, scale, before, after)
    end = max(len(before), len(after), 1)
    _draw_budget(axes, scale, budget_bytes, end)
    _label_curves(axes, scale, before, after)
    _dress(axes, scale, end, moments)
    _write_title(axes, name, before, after)
    return save_picture(axes, path)


def check_picture(path: Path) -> None:
    """Refuse early what cannot be drawn."""
    if path.suffix.lstrip(".") not in _FORMATS:
        raise UnknownName(f"Cannot draw {path.name}; a picture ends in .{' or .'.join(_FORMATS)}.")
    if find_spec("matplotlib") is None:
        raise MissingExtra(_NEEDS)


def open_axes(path: Path, place: tuple[float, float, float, float]) -> Axes:
    """Axes on an empty figure, to be written to `path`; `place` is left, bottom, width and height."""
    return open_figure(path).add_axes(place)


def open_figure(path: Path, height: float = 4.8) -> Figure:
    """An empty figure of the house's width, to be written to `path`; `height` is in inches."""
    check_picture(path)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(_NEEDS) from error
    figure = Figure(figsize=(9.6, height), dpi=160, facecolor="white")
    # A figure of our own leaves the user's pyplot state and backend alone.
    FigureCanvasAgg(figure)
    return figure


def save_picture(axes: Axes, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date, the same numbers give the same file.
    figure = axes.get_figure(root=True)
    assert figure is not None
    drawn = io.BytesIO()
    kind = path.suffix.lstrip(".")
    figure.savefig(drawn, format=kind, metadata={"Date": None} if kind == "svg" else None)
    write_bytes(path, drawn.getvalue())
    return path


def dress(axes: Axes, *, across: str, upward: str) -> None:
    """The house's axes: faint lines across, no box, both named."""
    axes.set_ylabel(upward, color=MUTED)
    axes.set_xlabel(across, color=MUTED)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.tick_params(colors=MUTED, length=0)


def write_title(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", pad=30, fontsize=15, fontweight="bold", color=INK)
    axes.text(0, 1.05, subtitle, transform=axes.transAxes, fontsize=10, color=MUTED)


def prepare_folder(folder: Path) -> None:
    """Make `folder`, and refuse early where no picture could be drawn or written."""
    if find_spec("matplotlib") is None:
        raise MissingExtra(_NEEDS)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RematError(f"Cannot make the folder {folder}: {error.strerror}; choose another one.") from error


def choose_scale(largest_bytes: int) -> Scale:
    """The largest binary unit of which `largest_bytes` holds at least one."""
    for unit, power in (("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if largest_bytes >= 1024**power:
            return Scale(unit, 1024**power)
    return Scale("B", 1)


def thin(values: Sequence[int], points: int = _POINTS) -> tuple[list[float], list[int]]:
    """Positions and values of at most `points` stretches of equal length, each shown by its largest value."""
    count = min(points, len(values))
    edges = [index * len(values) // count for index in range(count + 1)] if count else [0]
    stretches = list(zip(edges, edges[1:], strict=False))
    return [float(start) for start, _ in stretches], [max(values[start:end]) for start, end in stretches]


def _draw_curves(axes: Axes, scale: Scale, before: Sequence[int], after: Sequence[int]) -> None:
    for values, color, opacity in ((before, _BEFORE, 0.22), (after, _AFTER, 0.28)):
        positions, heights = thin(values)
        scaled = [height / scale.size_bytes for height in heights]
        axes.fill_between(positions, scaled, step="post", color=color, alpha=opacity, linewidth=0)
        axes.plot(positions, scaled, drawstyle="steps-post", color=color, linewidth=1.3)


def _label_curves(axes: Axes, scale: Scale, before: Sequence[int], after: Sequence[int]) -> None:
    """The plain curve is named at its peak, ours inside its area, where neither meets the budget's line."""
    plain, planned = max(before, default=0), max(after, default=0)
    top = (before.index(plain) if before else 0, plain / scale.size_bytes)
    _write(axes, f"plain PyTorch  {format_bytes(plain)}", top, (10, 2), MUTED)
    below = after.index(planned) if after else 0
    inside = (min(max(below, 0.15 * len(after)), 0.85 * len(after)), planned / scale.size_bytes * 0.4)
    _write(axes, f"Remat  {format_bytes(planned)}", inside, (0, 0), _AFTER, align="center", halo=False)


def _draw_budget(axes: Axes, scale: Scale, budget_bytes: int, end: int) -> None:
    height = budget_bytes / scale.size_bytes
    axes.axhline(height, color=LIMIT, linewidth=1.3, linestyle=(0, (5, 3)))
    _write(axes, f"budget  {format_bytes(budget_bytes)}", (end, height), (-4, 5), LIMIT, align="right")


def _write(
    axes: Axes,
    text: str,
    place: tuple[float, float],
    offset: tuple[int, int],
    color: str,
    *,
    align: str = "left",
    halo: bool = True,
) -> None:
    from matplotlib.patheffects import withStroke

    axes.annotate(
        text,
        place,
        xytext=offset,
        textcoords="offset points",
        color=color,
        fontsize=10.5,
        fontweight="bold",
        horizontalalignment=align,
        path_effects=[withStroke(linewidth=3, foreground="white", alpha=0.8)] if halo else None,
    )


def _dress(axes: Axes, scale: Scale, end: int, moments: str) -> None:
    axes.set_xlim(0, end)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
    dress(axes, across=f"{moments}, in order", upward=f"memory in use ({scale.unit})")


def _write_title(axes: Axes, name: str, before: Sequence[int], after: Sequence[int]) -> None:
    plain, planned = max(before, default=0), max(after, default=0)
    saving = 1 - planned / plain if plain else 0.0
    title = f"{name} trains in {saving:.0%} less memory"
    subtitle = "Bytes in use over one training step, as measured: plain PyTorch, and the same step under a budget"
    write_title(axes, title, subtitle)
