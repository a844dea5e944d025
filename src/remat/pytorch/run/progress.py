"""Progress of long work on stderr: a bar while ops are measured, a line while bounds close. Silent where piped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remat.solvers import Progress


class Reporter:
    """Shows progress where stderr is a terminal, or where asked to."""

    def __init__(self, show: bool | None = None) -> None:
        self._show = sys.stderr.isatty() if show is None else show

    @contextmanager
    def profiling(self) -> Iterator[Callable[[int, int, str], None] | None]:
        if not self._show:
            yield None
            return
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("measuring ops", total=None)

            def advance(done: int, total: int, _: str) -> None:
                bar.update(task, completed=done, total=total)

            yield advance

    @contextmanager
    def solving(self) -> Iterator[Callable[[Progress], None] | None]:
        if not self._show:
            yield None
            return
        from rich.console import Console

        console = Console(stderr=True)
        with console.status("planning") as status:

            def update(progress: Progress) -> None:
                best, bound = progress.time_ns / 1e6, progress.bound_ns / 1e6
                status.update(f"planning {progress.elapsed_s:.1f} s: best {best:.1f} ms, bound {bound:.1f} ms")

            yield update
