"""The public surface: exactly these names, each of which resolves, and clear words where torch is missing."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

import remat

FUNCTIONS = [
    "apply",
    "capped",
    "doctor",
    "dtr",
    "estimate",
    "fit",
    "guarded",
    "max_batch_size",
    "measure",
    "offload_optimizer",
    "optimize",
    "pareto",
    "plan",
    "plan_of",
    "profile",
    "set_budget",
    "verify",
]
TYPES = ["BatchSizer", "MaxTokensSampler"]
TYPES += ["Diagnosis", "Estimate", "MaxBatch", "Measurement", "Pareto", "Plan", "StepProfile", "Verification"]
ERRORS = [
    "BudgetError",
    "CaptureError",
    "FileFormatError",
    "InfeasibleBudget",
    "InfeasibleLayout",
    "InvalidGraph",
    "InvalidLayout",
    "InvalidSchedule",
    "MissingExtra",
    "OffloadFailed",
    "PlanMismatch",
    "ProfileStopped",
    "RankLost",
    "RanksDiffer",
    "RematError",
    "UnknownName",
    "VerificationError",
]
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; import remat; "


def test_public_names_are_exactly_these() -> None:
    assert sorted(remat.__all__) == sorted(FUNCTIONS + TYPES + ERRORS)


def test_every_public_name_resolves() -> None:
    pytest.importorskip("torch")
    assert [name for name in remat.__all__ if getattr(remat, name, None) is None] == []


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_a_remat_error(name: str) -> None:
    assert issubclass(getattr(remat, name), remat.RematError)


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        remat.optimise  # noqa: B018


def test_version_is_that_of_the_package() -> None:
    assert remat.__version__ == metadata.version("remat")


def test_missing_torch_names_the_extra() -> None:
    code = WITHOUT_TORCH + "remat.optimize"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingExtra: " in result.stderr
    assert "remat[torch]" in result.stderr


def test_torch_finds_the_compile_backend_by_its_entry_point() -> None:
    (entry,) = metadata.entry_points(group="torch_dynamo_backends", name="remat")
    pytest.importorskip("torch")
    assert callable(entry.load())
