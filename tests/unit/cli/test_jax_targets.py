"""Commands on a JAX loss: facts, files and exit codes as for PyTorch, and one sentence for what has no meaning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")

import numpy as np
from typer.testing import CliRunner, Result

import remat
from remat.cli import app
from remat.core.results.profile import MemoryClass
from remat.jax.sizes import resized, size_along

SOURCE = """
import jax
import jax.numpy as jnp

def net(parameters, x):
    for number, layer in enumerate(parameters):
        with jax.named_scope(f"layers.{number}"):
            x = jnp.tanh(x @ layer)
    return (x**2).mean()

def make(batch=256):
    keys = jax.random.split(jax.random.key(0), 6)
    return net, [jax.random.normal(key, (64, 64)) / 8 for key in keys], jnp.ones((batch, 64))

def fixed():
    return make()

def aux():
    loss, parameters, x = make()
    return lambda parameters, x: (loss(parameters, x), {"rows": x.sum()}), parameters, (x,)

def wrong():
    loss, parameters, x = make()
    return loss, parameters, x[:, :3]

def drifts():
    import jax.experimental
    seen = []
    loss, parameters, x = make()
    def changing(parameters, x):
        seen.append(1)
        return loss(parameters, x) * (1 + len(seen))
    return changing, parameters, x
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_loss.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "user_loss", raising=False)
    return "user_loss"


def test_plan_is_told_saved_and_reported(module: str, tmp_path: Path) -> None:
    result = run(
        "plan", f"{module}:make", "-b", "0.7x", "--time-limit", 1, "--json", "--explain", "", "-o", "plan.json"
    )
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["predicted_peak"] <= facts["budget"] < facts["plain_peak"]
    assert any(row["module"].startswith("layers.0") for row in facts["explanation"])
    assert remat.Plan.load(tmp_path / "plan.json").fingerprint.torch_version.startswith("jax")
    assert run("report", "plan.json", "-o", "plan.html").exit_code == 0
    assert (tmp_path / "plan.html").stat().st_size > 10_000


def test_profile_tells_classes_and_what_the_compiler_needs(module: str) -> None:
    result = run("profile", f"{module}:make", "--json", "-o", "profile.json")
    assert result.exit_code == 0, result.stderr
    assert "as modelled; compiled, they need" in result.stderr.replace("\n", " ")
    found = remat.StepProfile.load("profile.json")
    weights, rows = 6 * 64 * 64 * 4, 256 * 64 * 4
    sizes: Counter[MemoryClass] = Counter()
    for item in found.storages:
        sizes[item.kind] += item.size_bytes
    assert sizes[MemoryClass.PARAMETER] == sizes[MemoryClass.GRADIENT] == weights
    assert sizes[MemoryClass.INPUT] == rows and found.reserved_bytes > found.start_bytes == 2 * weights + rows + 4


def test_curve_falls_and_is_verified(module: str) -> None:
    result = run(
        "pareto", f"{module}:make", "--points", 3, "--solvers", "full", "--time-limit", 1, "--verify", "--json"
    )
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    peaks = [point["peak_bytes"] for point in facts["points"]]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3
    assert all(point["measured_peak_bytes"] > 0 for point in facts["points"])
    assert [point["solver"] for point in facts["baselines"]] == ["full"]


def test_verify_compares_up_to_rounding(module: str) -> None:
    result = run("verify", f"{module}:aux", "-b", "0.8x", "--steps", 2)
    assert result.exit_code == 0, result.stderr
    assert "same results and gradients up to rounding over 2 steps" in result.stdout.replace("\n", " ")


def test_verify_exits_4_where_results_differ(module: str) -> None:
    result = run("verify", f"{module}:drifts", "-b", "1x")
    assert result.exit_code == 4, result.output
    assert "differs by" in result.stderr


@pytest.mark.long
def test_larger_batches_fit_with_recomputation(module: str) -> None:
    result = run("max-batch", f"{module}:fixed", "-b", "1x", "--grid", 32, "--time-limit", 1, "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["plain"]["size"] == 256 < facts["size"]
    assert facts["measured_peak_bytes"] <= facts["budget_bytes"]


def test_arrays_of_the_batch_are_repeated_and_others_left() -> None:
    batch = (
        jax.numpy.arange(6).reshape(3, 2),
        {"mask": jax.ShapeDtypeStruct((3, 5), "int8"), "table": np.ones((7, 2))},
    )
    assert size_along(batch, "batch") == 3 and size_along(batch, "length") == 2
    first, rest = resized(batch, "batch", 4)
    assert first.tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert (rest["mask"].shape, rest["table"].shape) == ((4, 5), (7, 2))
    with pytest.raises(remat.RematError, match="No array of the batch has a dimension 1"):
        size_along((jax.numpy.ones(3),), "length")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "make", "-b", "1x", "--compiler", "inductor"), "always compiled by XLA"),
        (("plan", "make", "-b", "1x", "--count", "arena"), "XLA gives the values"),
        (("plan", "make", "-b", "1x", "--device", "cpu"), "JAX_PLATFORMS"),
        (("profile", "make", "--amp", "bf16"), "--amp is for PyTorch models"),
        (("estimate", "make"), "knows other devices for PyTorch models only"),
        (("plan", "wrong", "-b", "1x"), "cannot be traced on its batch: TypeError"),
        (("max-batch", "fixed", "-b", "50%"), "takes bytes or a share"),
        (("doctor", "make"), "is a JAX loss"),
    ],
)
def test_what_has_no_meaning_is_told_in_one_sentence(module: str, arguments: tuple[str, ...], message: str) -> None:
    command, name, *rest = arguments
    result = run(command, f"{module}:{name}", *rest)
    assert result.exit_code in (1, 2)
    assert message in result.stderr.replace("\n", " ")


def test_commands_need_no_torch(module: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from remat.cli import app; "
        f"app(['plan', '{module}:make', '-b', '1GiB', '--json', '--time-limit', '1'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["overhead"] == 0
