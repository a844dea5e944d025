"""Code that Inductor writes for a GPU under a plan, run on any machine: Triton interprets its kernels.

What a kernel writes over decides whether gradients are right, and differs from code for CPUs; these steps are too slow
to be anything but small. Where Triton is not installed they are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", minversion="3.7", reason="older ones do not interpret what NumPy 2 returns")

ASKED = ("scaled:bfloat16:0", "capped:float32:0", "mobile:float32:0", "normed:bfloat16:0")


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.support.gpu_code", *ASKED]
    root = Path(__file__).parents[2]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(ASKED, lines, strict=True))


@pytest.mark.parametrize("name", ASKED)
def test_what_is_written_over_changes_no_bit(found: dict[str, dict[str, Any]], name: str) -> None:
    assert found[name]["has_equal_bits"]
    assert found[name]["peak_bytes"] <= found[name]["peak_of_inductor_bytes"]


def test_what_is_normalized_again_needs_what_was_predicted(found: dict[str, dict[str, Any]]) -> None:
    """Were it computed once for several readers, in the type of its sums, a lean plan would need a tenth more."""
    made = found["normed:bfloat16:0"]
    assert made["peak_bytes"] <= 1.02 * made["predicted_bytes"]


@pytest.mark.parametrize("name", [name for name in ASKED if ":float32" in name])
def test_gradients_are_those_of_plain_pytorch(found: dict[str, dict[str, Any]], name: str) -> None:
    assert found[name]["apart"] < 1e-4


def test_a_wider_value_on_the_way_does_not_keep_a_kernel_from_writing_over_what_ends(
    found: dict[str, dict[str, Any]],
) -> None:
    figures = found["scaled:bfloat16:0"]
    assert figures["written_over"] > figures["written_over_by_inductor"]
