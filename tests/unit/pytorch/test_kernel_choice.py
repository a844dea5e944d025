"""Trying an op leaves torch's choice of kernels alone, and costs are told apart by it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from remat.pytorch.costs.op_costs import device_key
from remat.pytorch.kernel_choice import kernel_choice_kept, onednn_is_used


@pytest.mark.parametrize("before", [True, False])
def test_choice_is_restored_where_a_kernel_ends_the_use_of_onednn(
    monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", before)
    with pytest.raises(ZeroDivisionError), kernel_choice_kept():
        # As torch does at the first product in a precision that the processor has no kernel for.
        torch.backends.mkldnn.enabled = False
        raise ZeroDivisionError
    assert onednn_is_used() is before


def test_costs_without_onednn_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for enabled in (True, False):
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", enabled)
        keys.add(device_key(torch.device("cpu")))
    assert len(keys) == 2
