"""Sharing drawn: memory upwards, time to the right, one band for each tag, one box for each buffer.

In: sharings of the same step, each with a caption. Out: an SVG text, panels side by side on one scale. It is written by
hand, so that it is small and the same numbers always give the same file. Where a buffer is written into another one,
the boxes touch with a thick edge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from remat.core.budget import format_bytes
from remat.layout.sharing import Sharing

_WIDTH, _HEIGHT, _LEAST = 264, 190, 5
"""Pixels: the width of a panel, the height of the tallest one, and the least height of a band."""
_LEFT, _TOP, _GAP = 12, 46, 34
_COLORS = ("#cfe8ef", "#d8e9cf", "#f3e2c6", "#e7d8ee", "#f4d5d5", "#d5dcf4")
_INK, _MUTED, _EDGE = "#1f2933", "#52606d", "#0b7285"

Panel = tuple[str, Sharing]


def draw_sharing(title: str, panels: Sequence[Panel], names: Mapping[str, str]) -> str:
    """The panels as one SVG; `names` are what to write on the buffers, by id."""
    steps = max((buffer.upper for _, sharing in panels for buffer in sharing.storages.buffers), default=0)
    step = _WIDTH // max(steps, 1)
    scale = _HEIGHT / max((sharing.total_bytes for _, sharing in panels), default=1)
    bands = [_bands(sharing, scale) for _, sharing in panels]
    bottom = _TOP + max(sum(heights) for heights in bands)
    width = _LEFT + len(panels) * (steps * step + _GAP)
    parts = [_text(_LEFT, 18, title, _INK, 13, weight="bold")]
    for place, ((caption, sharing), heights) in enumerate(zip(panels, bands, strict=True)):
        left = _LEFT + place * (steps * step + _GAP)
        parts.append(_text(left, _TOP - 8, f"{caption}: {format_bytes(sharing.total_bytes)}", _MUTED, 11))
        parts += _panel(sharing, heights, (left, bottom, steps), step, names)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 22}" width="{width}"'
    body = "\n".join(parts)
    return f'{head} font-family="sans-serif">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'


def _bands(sharing: Sharing, scale: float) -> list[int]:
    return [max(_LEAST, round(size * scale)) for size in sharing.tag_bytes]


def _panel(
    sharing: Sharing, heights: Sequence[int], place: tuple[int, int, int], step: int, names: Mapping[str, str]
) -> list[str]:
    """One sharing: its bands from the bottom up, in the order of their tags; `place` is left, bottom and steps."""
    left, bottom, steps = place
    floors = [bottom - sum(heights[:tag]) for tag in range(len(heights))]
    end = left + steps * step
    parts = [_line(left, floor - height, end) for floor, height in zip(floors, heights, strict=True)]
    parts.append(_line(left, bottom, end, _INK))
    over = {dying: sharing.storages.buffers[born].lower for dying, born in sharing.in_place}
    written = {born for _, born in sharing.in_place}
    for number, (tag, buffer) in enumerate(zip(sharing.tags, sharing.storages.buffers, strict=True)):
        height = max(_LEAST - 1, round(heights[tag] * buffer.size / sharing.tag_bytes[tag])) - 1
        upper = over.get(number, buffer.upper)
        x, y, width = left + buffer.lower * step, floors[tag] - height, (upper - buffer.lower) * step
        parts.append(_box(x, y, width, height, _COLORS[number % len(_COLORS)]))
        if number in written:
            parts.append(f'<path d="M{x} {y}v{height}" stroke="{_EDGE}" stroke-width="3"/>')
        if height >= 9:
            parts.append(_text(x + 4, y + height / 2 + 3.5, names[buffer.id], _INK, 10))
    parts.append(_text(left, bottom + 15, "time →", _MUTED, 10))
    return parts


def _box(x: int, y: float, width: int, height: int, color: str) -> str:
    return f'<rect x="{x + 0.5}" y="{y:g}" width="{width - 1}" height="{height}" fill="{color}"/>'


def _line(left: int, y: int, right: int, color: str = "#e4e7eb") -> str:
    return f'<path d="M{left} {y}H{right}" stroke="{color}"/>'


def _text(x: float, y: float, text: str, color: str, size: int, weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}" font-weight="{weight}">{escape(text)}</text>'
