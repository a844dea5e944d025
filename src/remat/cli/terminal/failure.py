"""What a user sees when a command fails or warns: one line on stderr, and an exit code for any exception."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable

import typer

from remat.errors import RematError

TRACEBACK_VARIABLE = "REMAT_TRACEBACK"


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """The same command, with its exceptions turned into one line and an exit code."""

    @functools.wraps(command)
    def run(*args: object, **kwargs: object) -> None:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                command(*args, **kwargs)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if os.environ.get(TRACEBACK_VARIABLE):
                raise
            typer.echo(f"remat: error: {describe(error)}", err=True)
            raise typer.Exit(error.exit_code if isinstance(error, RematError) else 1) from error

    return run


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """One line, without the place in our own code that a user cannot do anything about."""
    typer.echo(f"remat: warning: {' '.join(str(message).split())}", err=True)


def _printable(text: str) -> str:
    """A name in a file must not be able to move the cursor or change colours."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def describe(error: Exception) -> str:
    """One line; an error that is not ours also says its kind and how to see where it comes from."""
    text = _printable(" ".join(str(error).split()))
    if isinstance(error, RematError):
        return text
    return f"{type(error).__name__}: {text} (set {TRACEBACK_VARIABLE}=1 to see where)"
