"""`remat doctor`: what is wrong, with a model under a budget or, without one, with the installation.

A model is run for a few steps: what is planned, what is not and why, whether bits are equal, and what to do. Otherwise:
what is installed, what the machine offers, and whether a tiny model trains under a budget.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from importlib import metadata
from importlib.util import find_spec
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from remat.cli.options import DeviceOption, JsonOption, ScaleOption, SeedOption, TimeLimitOption
from remat.cli.request import check_request
from remat.cli.target import load_target, runs_target
from remat.cli.terminal.console import show, show_json, working
from remat.core.budget import format_bytes
from remat.errors import VerificationError
from remat.report.tables.diagnosis import diagnosis_facts, diagnosis_tables

_EXTRAS = {
    "numpy": "remat",
    "torch": "remat[torch]",
    "highspy": "remat[solvers]",
    "matplotlib": "remat[report]",
}
_CHECK_BUDGET = "0.6x"


PatientArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="`package.module:factory` or the name of a zoo model; without it, the installation is looked at.",
        show_default=False,
    ),
]
BudgetOption = Annotated[
    str,
    typer.Option("--budget", "-b", help='What the model is run under, as for plan: bytes, "8GiB", "0.5x".'),
]


def doctor(
    target: PatientArgument = "",
    budget: BudgetOption = "0.8x",
    time_limit: TimeLimitOption = 10.0,
    scale: ScaleOption = "tiny",
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Find out what is wrong with a model under a budget, and what to do; without a model, with the installation."""
    if target:
        _examine(target, budget, time_limit, scale=scale, device=device, seed=seed, as_json=as_json)
    else:
        _check_installation(as_json)


def _examine(target: str, budget: str, time_limit: float, *, scale: str, device: str, seed: int, as_json: bool) -> None:
    import remat

    check_request(budget, "auto")
    example = load_target(target, scale=scale, device=device, seed=seed)
    with working(f"Running {target} under {budget}"), runs_target(target), contextlib.redirect_stdout(sys.stderr):
        found = remat.doctor(example.model, *example.args, budget=budget, time_limit=time_limit, **example.kwargs)
    if as_json:
        show_json(diagnosis_facts(found, target))
    else:
        show(*diagnosis_tables(found, target))
    if not found.ok:
        raise typer.Exit(1)


def _check_installation(as_json: bool) -> None:
    facts = {**_versions(), **_machine()}
    has_torch = find_spec("torch") is not None
    differences = _self_check() if has_torch else ()
    facts["self-check"] = _verdict(differences) if has_torch else "skipped without torch"
    if as_json:
        show_json({**facts, "solvers": list(_solvers()), "ok": not differences})
    else:
        show(_table(facts))
    if differences:
        raise VerificationError(f"The self-check failed: {differences[0]}.")


def _versions() -> dict[str, str | None]:
    own: dict[str, str | None] = {"remat": metadata.version("remat"), "python": platform.python_version()}
    return own | {name: _version(name) for name in _EXTRAS}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, str | None]:
    from remat.core.cache_file import cache_folder

    return {
        "platform": platform.platform(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": format_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "device": _device(),
        "cache": str(cache_folder()),
    }


def _device() -> str:
    if find_spec("torch") is None:
        return "unknown without torch"
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {format_bytes(properties.total_memory)}"


def _solvers() -> tuple[str, ...]:
    from remat.solvers import REGISTRY

    return tuple(solver.name for solver in REGISTRY)


def _self_check() -> tuple[str, ...]:
    from remat.cli.subjects import open_subject

    return open_subject("mlp").differences(_CHECK_BUDGET, "auto", steps=1, seed=0)


def _verdict(differences: tuple[str, ...]) -> str:
    return f"differs: {differences[0]}" if differences else f"the same bits under {_CHECK_BUDGET}"


def _table(facts: dict[str, str | None]) -> Table:
    table = Table(title="remat doctor", box=box.SIMPLE, show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="dim")
    table.add_column()
    for name, fact in facts.items():
        table.add_row(name, fact if fact is not None else escape(f"not installed: pip install '{_EXTRAS[name]}'"))
    table.add_row("solvers", ", ".join(_solvers()))
    return table
