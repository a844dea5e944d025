"""Progress of a solve, and Ctrl-C while it runs."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from remat.cli.terminal import progress as module
from remat.cli.terminal.interrupt import Interrupt
from remat.cli.terminal.progress import progress_line, solving
from remat.core import Status, save_problem
from remat.solvers import Progress, get_solver, solve
from remat.solvers.sweep import plain_peak_bytes
from remat.zoo.synthetic import random_layered

INFINITY = float("inf")


def hard():
    """A problem that keeps `auto` busy for longer than a test waits."""
    problem = random_layered(250, 0)
    return problem.with_budget(int(0.75 * plain_peak_bytes(problem)))


def test_line_shows_both_bounds_in_the_files_unit_and_in_per_cent() -> None:
    line = progress_line(Progress(1.0, 108_000.0, 105_000.0, "search"), 100_000.0, 1.26)
    assert line == "1.3 s: time 108,000 (+8.00%), bound 105,000 (+5.00%), gap 2.78%, by search"


def test_line_before_the_first_schedule_has_a_dash() -> None:
    assert progress_line(Progress(0.0, INFINITY, 110.0, "cut"), 100.0, 0.0) == (
        "0.0 s: time –, bound 110 (+10.00%), gap –, by cut"
    )


def test_line_of_a_proof_that_nothing_fits() -> None:
    assert "bound nothing fits" in progress_line(Progress(0.0, INFINITY, INFINITY, "cut"), 100.0, 0.0)


def test_line_of_a_graph_that_takes_no_time() -> None:
    assert "time 0 (+0.00%), bound 0 (+0.00%), gap –" in progress_line(Progress(0.0, 0.0, 0.0, "cut"), 0.0, 0.0)


def test_piped_lines_are_few_and_end_with_the_last(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_since", lambda start: 0.5)
    with solving("Solving", 100.0) as tell:
        for number in range(100):
            tell(Progress(0.0, 200.0 - number, 100.0, "search"))
    lines = capsys.readouterr().err.splitlines()
    assert (lines[0], len(lines)) == ("Solving", 3)
    assert "time 200 " in lines[1]
    assert "time 101 " in lines[2]


def test_terminal_gets_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(module, "Console", lambda **_: Console(file=shown, force_terminal=True, width=120))
    with solving("Solving [/b].json", 100.0) as tell:
        _wait_for("Solving [/b].json", shown)
        tell(Progress(0.0, 150.0, 110.0, "search"))
        _wait_for("bound 110 (+10.00%)", shown)


def _wait_for(text: str, shown: io.StringIO) -> None:
    """A thread of rich's draws the line, whenever it gets its turn."""
    deadline = time.monotonic() + 60
    while text not in shown.getvalue():
        assert time.monotonic() < deadline, shown.getvalue()
        time.sleep(0.01)


@pytest.fixture
def hears_interrupts() -> Iterator[None]:
    """Python's own handler: a process in the background of a shell is started with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_interrupts")
def test_first_interrupt_makes_auto_return_its_best_schedule() -> None:
    interrupt = Interrupt()
    told: list[str] = []

    def press(_: Progress) -> None:
        if not interrupt.asked:
            os.kill(os.getpid(), signal.SIGINT)

    solver = interrupt.heeded_by(get_solver("auto"))
    with interrupt.caught(told.append):
        found = solve(hard(), solver, time_limit_s=600.0, gap=0.0, progress=press)
    assert found.status is Status.FEASIBLE
    assert len(told) == 1


@pytest.mark.usefixtures("hears_interrupts")
def test_second_interrupt_is_pythons_own() -> None:
    interrupt = Interrupt()
    interrupt.heeded_by(get_solver("auto"))
    with pytest.raises(KeyboardInterrupt), interrupt.caught(lambda _: None):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("hears_interrupts")
def test_solver_without_a_clock_is_interrupted_at_once() -> None:
    interrupt = Interrupt()
    solver = get_solver("none")
    assert interrupt.heeded_by(solver) is solver
    with pytest.raises(KeyboardInterrupt), interrupt.caught(lambda _: None):
        os.kill(os.getpid(), signal.SIGINT)


def test_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupt = Interrupt()
    interrupt.heeded_by(get_solver("auto"))
    with interrupt.caught(lambda _: None):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupted_command_prints_the_best_schedule(tmp_path: Path) -> None:
    problem = hard()
    save_problem(problem, tmp_path / "hard.json")
    command = [sys.executable, "-m", "remat", "solve", str(tmp_path / "hard.json"), "--json", "--gap", "0"]
    command += ["--budget", str(problem.budget_bytes), "--time-limit", "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if ": time " in line and "time –" not in line:
                break
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    facts = json.loads(output)
    assert facts["status"] == "FEASIBLE"
    assert facts["peak"] <= facts["budget"]
    assert facts["schedule"]
