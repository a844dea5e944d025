"""Is a request sound? Asked before anything slow starts: a typing error should not cost a minute of work."""

from __future__ import annotations

import os
from pathlib import Path

from remat.core.budget import parse_budget
from remat.distributed.links import ENGINES, parse_pipeline
from remat.errors import FileFormatError, RematError, UnknownName


def check_request(budget: str, solver: str = "auto") -> None:
    """Refuse a budget that cannot be read and a solver that does not exist."""
    from remat.solvers import get_solver

    parse_budget(budget)
    get_solver(solver)


def check_solvers(names: str) -> tuple[str, ...]:
    """The solvers of a list such as `full,sqrt_n`; one that does not exist is refused."""
    from remat.solvers import get_solver

    found = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in found:
        get_solver(name)
    return found


def check_scale(scale: str) -> None:
    from remat.zoo import SCALES

    if scale not in SCALES:
        raise UnknownName(f"No scale is called {scale!r}; choose one of {', '.join(SCALES)}.")


def check_ranks(world: int | None, parallel: str, bandwidth: float, latency: float) -> None:
    """Refuse ranks and links that cannot be."""
    if world is None:
        return
    if world < 1:
        raise RematError(f"A step cannot be planned for {world} ranks; give 1 or more.")
    if parse_pipeline(parallel) is None and parallel not in ENGINES:
        known = ", ".join((*ENGINES, "pp:4"))
        raise RematError(f"There is no way to train in parallel called {parallel!r}; write {known}.")
    if bandwidth <= 0 or latency < 0:
        raise RematError(
            f"No link has {bandwidth:g} GB/s and {latency:g} µs; give a bandwidth above 0, a latency from 0."
        )


def check_report(file: Path | None) -> None:
    """Refuse a report of an unknown kind, one whose library is missing, and one that has no folder."""
    from remat.report.write import find_format

    if file is not None:
        find_format(file)
        check_folder(file)


def check_folder(file: Path | None) -> None:
    """Refuse an output file whose folder is missing or closed."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise FileFormatError(f"Cannot write {file}: there is no folder {file.parent}; create it first.")
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise FileFormatError(f"Cannot write {file}: it is a folder, or its folder is closed; choose another name.")
