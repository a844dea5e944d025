"""Ways to train side by side as one HTML file that needs nothing else: words, a chart, a table.

In: a `FitSheet`. Out: a page whose chart is drawn as SVG in place; nothing is fetched and nothing runs.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from remat.core.budget import format_bytes
from remat.core.document import write_text
from remat.core.results.fit_sheet import FitRow, FitSheet
from remat.report.tables.fit import fit_sheet, format_seconds
from remat.report.tables.sheet import Sheet

_WIDTH, _HEIGHT, _EDGE = 720, 360, 60
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}
table{border-collapse:collapse;font-size:13px}
td,th{padding:.3rem .6rem;border-bottom:1px solid #8884;text-align:right}
td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}
svg{max-width:100%;height:auto}
text{fill:currentColor;font-size:12px}
.axis{stroke:currentColor}.limit{stroke:#c33;stroke-dasharray:4}.fits{fill:#27a}.not{fill:#c33}
"""


def write_fit_page(found: FitSheet, path: str | Path) -> Path:
    path = Path(path)
    write_text(path, fit_page(found))
    return path


def fit_page(found: FitSheet) -> str:
    """The whole page as text."""
    words = "".join(f"<p>{escape(sentence)}</p>" for sentence in found.sentences)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(found.title)}</title>'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<style>{_STYLE}</style></head><body><h1>{escape(found.title)}</h1>{words}"
        f"{_chart(found)}{_table(fit_sheet(found))}</body></html>\n"
    )


def _table(sheet: Sheet) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in sheet.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in sheet.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table><p>{escape(sheet.note)}</p>"


def _chart(found: FitSheet) -> str:
    right = 1.05 * max([found.capacity_bytes, *(row.peak_bytes for row in found.rows)])
    top = 1.1 * max(row.seconds_per_sample for row in found.rows) or 1.0
    limit = _EDGE + found.capacity_bytes / right * _WIDTH
    points = "".join(_point(number, row, right, top) for number, row in enumerate(found.rows))
    return (
        f'<svg viewBox="0 0 {_WIDTH + 2 * _EDGE} {_HEIGHT + 2 * _EDGE}" role="img" aria-label="time against memory">'
        f'<path class="axis" fill="none" d="M{_EDGE} {_EDGE}V{_EDGE + _HEIGHT}H{_EDGE + _WIDTH}"/>'
        f'<path class="limit" d="M{limit:.1f} {_EDGE}V{_EDGE + _HEIGHT}"/>'
        f'<text x="{_EDGE}" y="{_EDGE - 12}">{format_seconds(top)} per sample</text>'
        f'<text x="{_EDGE + _WIDTH}" y="{_EDGE + _HEIGHT + 24}" text-anchor="end">peak: {format_bytes(right)}</text>'
        f'<text x="{limit:.1f}" y="{_EDGE + _HEIGHT + 24}" text-anchor="middle">'
        f"{format_bytes(found.capacity_bytes)}</text>{points}</svg>"
    )


def _point(number: int, row: FitRow, right: float, top: float) -> str:
    x, y = _EDGE + row.peak_bytes / right * _WIDTH, _EDGE + _HEIGHT * (1 - row.seconds_per_sample / top)
    mark = chr(ord("a") + number % 26)
    return (
        f'<circle class="{"fits" if row.fits else "not"}" cx="{x:.1f}" cy="{y:.1f}" r="6">'
        f"<title>{escape(row.label)}</title></circle>"
        f'<text x="{x + 9:.1f}" y="{y + 4:.1f}">{mark}</text>'
    )
