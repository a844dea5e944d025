"""Processes take turns at a device, and nobody waits for ever."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from remat.pytorch.costs.turns import turn_at

OTHER = """
import sys, time
from remat.pytorch.costs.turns import turn_at
with turn_at("a device"):
    print("mine", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_turn_is_waited_for_and_taken_when_it_is_free(cache: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdin is not None and other.stdout is not None
    assert other.stdout.readline() == "mine\n"
    began = time.monotonic()
    with turn_at("a device", wait_s=0.2):
        assert time.monotonic() - began >= 0.2, "the other has it, and after a while both go on"
    with turn_at("another", wait_s=60.0):
        pass
    other.communicate("\n")
    with turn_at("a device", wait_s=60.0):
        assert time.monotonic() - began < 30.0


def test_without_a_place_for_a_lock_there_are_no_turns(cache: Path) -> None:
    cache.write_text("a file where a folder should be")
    entered = False
    with turn_at("a device"):
        entered = True
    assert entered
