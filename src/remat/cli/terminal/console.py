"""Where output goes: results to stdout as tables or one JSON object, everything else to stderr."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import typer
from rich.console import Console, RenderableType

_PIPED_WIDTH = 120


def show(*renderables: RenderableType) -> None:
    """Print to stdout: in colour on a terminal, plainly where it is piped or NO_COLOR is set."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH)
    for renderable in renderables:
        console.print(renderable)


def show_json(facts: Mapping[str, object]) -> None:
    typer.echo(json.dumps(facts))


def log(message: str) -> None:
    """One line of progress on stderr."""
    Console(stderr=True).print(message, style="dim", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def working(message: str) -> Iterator[None]:
    """A spinner on stderr while something takes its time; one plain line where stderr is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        log(message)
        yield
        return
    with console.status(message):
        yield
