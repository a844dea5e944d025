"""The command line: one file per command, wired here.

Results go to stdout, progress and errors to stderr. Exit codes: 0 fine, 1 error, 2 usage, 3 infeasible,
4 verification failed. An error is one line, never a traceback, unless REMAT_TRACEBACK is set.
"""

from __future__ import annotations

from typing import Annotated

import typer

from remat.cli import (
    bench,
    demo,
    doctor,
    estimate,
    fit,
    ladder,
    layout,
    max_batch,
    pareto,
    plan,
    profile,
    report,
    solve,
    verify,
)
from remat.cli.terminal.failure import reports_errors

__all__ = ["app", "main"]


def _show_version(asked: bool) -> None:
    if asked:
        from remat import __version__

        typer.echo(f"remat {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="remat",
    help="Train a model under a memory budget: the fastest schedule that fits, with the same gradients.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    demo.demo,
    plan.plan,
    profile.profile,
    estimate.estimate,
    fit.fit,
    ladder.ladder,
    pareto.pareto,
    max_batch.max_batch,
    report.report,
    solve.solve,
    layout.layout,
    verify.verify,
    bench.bench,
    doctor.doctor,
):
    app.command()(reports_errors(command))


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    app()
