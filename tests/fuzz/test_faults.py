"""Errors, interrupts and out-of-memory errors in the middle of steps; 200 of them with `--long`."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.fuzz.faults import broken_promise

FEW = 6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "seed", [*range(FEW), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(FEW, 200))]
)
def test_training_goes_on_after_a_fault_as_if_nothing_had_happened(seed: int) -> None:
    assert broken_promise(seed) == ""
