"""Failures at the command line: one line on stderr, the error's exit code, no traceback."""

from __future__ import annotations

import warnings

import pytest
import typer

from remat.cli.terminal.failure import TRACEBACK_VARIABLE, describe, reports_errors
from remat.errors import BudgetError, InfeasibleBudget, RematError, VerificationError


def raiser(error: Exception):
    @reports_errors
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RematError("went wrong"), 1),
        (BudgetError("bad budget"), 2),
        (InfeasibleBudget("too small", 12), 3),
        (VerificationError("differs"), 4),
        (ValueError("not ours"), 1),
    ],
)
def test_error_becomes_one_line_and_its_exit_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught:
        raiser(error)()
    captured = capsys.readouterr()
    assert caught.value.exit_code == code
    assert captured.out == ""
    assert captured.err == f"remat: error: {describe(error)}\n"


def test_message_over_several_lines_becomes_one() -> None:
    assert describe(RematError("first\n  second")) == "first second"


def test_foreign_error_says_its_kind_and_how_to_see_more() -> None:
    assert describe(ValueError("odd")) == "ValueError: odd (set REMAT_TRACEBACK=1 to see where)"


def test_warning_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    @reports_errors
    def command() -> None:
        warnings.warn("first\n second", stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        command()
    assert capsys.readouterr() == ("", "remat: warning: first second\n")


def test_traceback_is_shown_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
    with pytest.raises(ValueError, match="odd"):
        raiser(ValueError("odd"))()
