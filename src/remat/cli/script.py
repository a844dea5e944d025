"""`remat profile -- python train.py …`: an unmodified script, run in a Python of its own while one step is followed.

In: the words of a Python command. The child runs the same script under `remat.pytorch.measure.script`, which writes a
profile once the second step is over; it is told while the script goes on. The script's own output goes to stderr.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from remat.cli.terminal.console import log
from remat.core.results.profile import StepProfile
from remat.errors import ProfileStopped, RematError, UnknownName

if TYPE_CHECKING:
    from collections.abc import Iterator

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?")
_LOOK_EVERY_S = 0.2
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")


def is_script(words: Sequence[str]) -> bool:
    """Whether these words are a command rather than a target."""
    return len(words) > 1 or words[0].endswith(".py") or _is_python(words[0])


def profile_script(words: Sequence[str], tell: Callable[[StepProfile], None], *, stop: bool) -> None:
    """Run the script to its end and tell its profile as soon as there is one."""
    with tempfile.TemporaryDirectory(prefix="remat-") as folder:
        path = Path(folder) / "profile.json"
        command = child_command(words, path, stop)
        log(f"Running {' '.join(words)}; its second training step will be followed")
        found, code = _run(command, path, tell)
    if found is None:
        raise RematError(
            f"The script ended with exit code {code} and no training step: a profile needs an optimizer of "
            "torch.optim that steps in the script's own process."
        )
    if found.stopped_by:
        raise ProfileStopped(found.stopped_by, found)
    if code:
        raise RematError(f"The script was profiled, and ended later with exit code {code}.")


def child_command(words: Sequence[str], output: Path, stop: bool) -> list[str]:
    """The same command with our runner between Python and the script."""
    python, rest = (words[0], words[1:]) if _is_python(words[0]) else (sys.executable, words)
    if python == Path(python).name:
        # Without a path, the Python that runs us: it is sure to have Remat.
        python = sys.executable
    options, script = _split(rest)
    if not script or (script[0] != "-m" and not script[0].endswith(".py")):
        raise UnknownName(
            f"remat profile runs `python script.py …`, `python -m package …` or `script.py …`; found "
            f"{' '.join(words)!r}. Write the Python command that starts the training."
        )
    if script[0] != "-m" and not Path(script[0]).is_file():
        raise UnknownName(f"There is no script {script[0]!r} here; check the path.")
    runner = ["-m", "remat.pytorch.measure.script", str(output), "stop" if stop else "go-on"]
    return [python, *options, *runner, *script]


def _run(command: Sequence[str], path: Path, tell: Callable[[StepProfile], None]) -> tuple[StepProfile | None, int]:
    # Results alone go to stdout. Torch's allocator logs that it does not know the sizes of what was there before.
    child = subprocess.Popen(command, stdout=2, env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ})
    found: StepProfile | None = None
    for _ in _while_running(child):
        if found is None and path.exists():
            found = StepProfile.load(path)
            tell(found)
    return found, child.returncode


def _while_running(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Now and then while the child runs, and once more when it is over."""
    try:
        while child.poll() is None:
            yield
            time.sleep(_LOOK_EVERY_S)
        yield
    finally:
        # Ctrl-C reaches the child too; it ends as it would without us.
        child.wait()


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Python's own options, and the script with what follows."""
    options: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        if rest[0] == "-c":
            return options, []
        taken = 2 if rest[0] in _WITH_VALUE else 1
        options += rest[:taken]
        rest = rest[taken:]
    return options, rest


def _is_python(word: str) -> bool:
    return _PYTHON.fullmatch(Path(word).name) is not None
