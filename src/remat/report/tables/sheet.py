"""A table before it is drawn: the same cells for a terminal and for a Markdown file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Sheet:
    title: str
    columns: tuple[str, ...]
    """The first is written from the left, the others from the right."""
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    """What a reader has to know."""

    def as_table(self) -> Table:
        table = Table(title=Text(self.title), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        if self.note:
            table.caption, table.caption_justify = Text(self.note, style="dim"), "left"
        for number, name in enumerate(self.columns):
            table.add_column(Text(name), justify="right" if number else "left", no_wrap=number == 0)
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def as_markdown(self) -> str:
        rule = ["---", *("---:" for _ in self.columns[1:])]
        lines = [_line(cells) for cells in (self.columns, rule, *self.rows)]
        return "\n".join([f"## {self.title}", "", *lines, "", *([self.note, ""] if self.note else [])])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
