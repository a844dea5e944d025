"""Progress on stderr: live on a terminal, plain lines elsewhere.

A solve shows its schedule and bound closing in on each other; work of many parts shows how many are done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from remat.cli.terminal.console import log
from remat.report.tables.text import amount, gap_share

if TYPE_CHECKING:
    from remat.solvers import Progress

_EVERY_S = 1.0
"""Plain lines come no faster than this; the last one always comes."""


@contextmanager
def solving(message: str, base_time: float) -> Iterator[Callable[[Progress], None]]:
    """Yields what a solver tells its progress to."""
    console = Console(stderr=True)
    if console.is_terminal:
        # As text, because a file's name may look like markup.
        with console.status(Text(message)) as status:
            start = time.monotonic()
            yield lambda progress: status.update(Text(progress_line(progress, base_time, _since(start))))
        return
    log(message)
    lines = _Lines(base_time)
    try:
        yield lines.tell
    finally:
        lines.finish()


@contextmanager
def parts(message: str) -> Iterator[Callable[[int, int, str], None]]:
    """Yields what is told how many parts are done, how many there are, and which comes next."""
    console = Console(stderr=True)
    if not console.is_terminal:
        log(message)
        yield lambda done, total, what: log(f"{done + 1} of {total}: {what}" if total > 1 else what)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(escape(message), total=None)

        def tell(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total if total > 1 else None, description=escape(what))

        yield tell


class _Lines:
    def __init__(self, base_time: float) -> None:
        self._base_time, self._start = base_time, time.monotonic()
        self._shown_s = float("-inf")
        self._waiting: str | None = None

    def tell(self, progress: Progress) -> None:
        elapsed = _since(self._start)
        self._waiting = progress_line(progress, self._base_time, elapsed)
        if elapsed - self._shown_s >= _EVERY_S:
            self._shown_s = elapsed
            self.finish()

    def finish(self) -> None:
        if self._waiting is not None:
            log(self._waiting)
        self._waiting = None


def progress_line(progress: Progress, base_time: float, elapsed_s: float) -> str:
    """`1.3 s: time 108 (+8.00%), bound 105 (+5.00%), gap 2.78%, by search`; a dash before the first schedule."""
    found = progress.time_ns < float("inf")
    best = _both(progress.time_ns, base_time) if found else "–"
    bound = _both(progress.bound_ns, base_time) if progress.bound_ns < float("inf") else "nothing fits"
    gap = gap_share(max(0.0, 1 - progress.bound_ns / progress.time_ns)) if found and progress.time_ns > 0 else "–"
    return f"{elapsed_s:.1f} s: time {best}, bound {bound}, gap {gap}, by {progress.message}"


def _both(time_ns: float, base_time: float) -> str:
    """In the file's unit, and in per cent over the plain time."""
    over = time_ns / base_time - 1 if base_time > 0 else 0.0
    return f"{amount(time_ns)} ({over:+.2%})"


def _since(start: float) -> float:
    return time.monotonic() - start
