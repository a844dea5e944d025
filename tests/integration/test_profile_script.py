"""`remat profile -- python train.py …`: scripts as they are, the second step followed, failures told in a sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import remat
from remat.core.results.profile import Phase

SCRIPT = """
import sys
import torch
from torch import nn
from beside import WIDTH

steps, fails_at = int(sys.argv[1]), int(sys.argv[2])
model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(steps):
    x, y = torch.randn(128, WIDTH), torch.randint(10, (128,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if step == fails_at:
        raise ValueError("loss is not finite")
    optimizer.step()
    print("step", step)
print("done as", __name__)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("WIDTH = 32\n")
    return tmp_path


def run(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "remat", "profile", *map(str, words)]
    sources = str(Path(remat.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600
    )


def test_second_step_of_a_script_is_followed_and_the_script_goes_on(folder: Path) -> None:
    result = run(folder, "--json", "--output", "profile.json", "--", "python", "train.py", 3, -1)
    assert result.returncode == 0, result.stderr
    assert "step 2\ndone as __main__" in result.stderr
    facts = json.loads(result.stdout)
    found = remat.StepProfile.load(folder / "profile.json")
    assert facts["peak_bytes"] == found.peak_bytes
    assert [op.phase for op in found.ops] == sorted((op.phase for op in found.ops), key=list(Phase).index)
    parameters = (32 * 64 + 64 + 64 * 10 + 10) * 4
    assert facts["breakdown"]["parameters"] == parameters
    assert facts["breakdown"]["optimizer state"] == 2 * parameters + 4 * 4
    assert facts["breakdown"]["inputs"] == 128 * 32 * 4 + 128 * 8
    assert {op.module for op in found.ops} == {"", "0", "1", "2"}


def test_module_run_with_dash_m_is_stopped_when_asked(folder: Path) -> None:
    result = run(folder, "--json", "--stop", "--", "python", "-m", "train", 3, -1)
    assert result.returncode == 0, result.stderr
    assert "done as" not in result.stderr
    assert json.loads(result.stdout)["name"] == "train"


@pytest.mark.parametrize(("fails_at", "ops"), [(0, "cross_entropy"), (1, "clip")])
def test_script_that_fails_keeps_what_was_learnt(folder: Path, fails_at: int, ops: str) -> None:
    result = run(folder, "--json", "--", "train.py", 3, fails_at)
    assert result.returncode == 1
    facts = json.loads(result.stdout)
    assert facts["stopped_by"].endswith("ValueError: loss is not finite")
    assert facts["ops"] > 10
    assert f"remat: error: {facts['stopped_by']}" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("torchrun", "train.py"), 2, "found 'torchrun train.py'. Write the Python command"),
        (("python", "-c", "pass"), 2, "found 'python -c pass'"),
        (("python", "nowhere.py"), 2, "There is no script 'nowhere.py' here"),
        (("python", "beside.py"), 1, "ended with exit code 0 and no training step"),
    ],
)
def test_command_that_cannot_be_profiled_is_one_sentence(
    folder: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    result = run(folder, "--", *words)
    assert result.returncode == code
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
