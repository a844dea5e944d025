"""How fast copies are is measured once for each device and level, and what is on disk is checked when it is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from remat.errors import OffloadFailed
from remat.pytorch.costs.op_costs import device_key
from remat.pytorch.host import rates
from remat.pytorch.host.levels import Level
from remat.pytorch.host.rates import CopyRates, RatesCache, copy_rates

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(rates, "PROBE_BYTES", 2**20)
    return RatesCache(device_key(CPU), tmp_path / "cache" / "copies").path


@pytest.mark.parametrize("is_disk", [False, True])
def test_rates_are_measured_once(is_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The budget is the user's, and the probe may be larger.
    level = Level(tmp_path if is_disk else None, 4096)
    found = copy_rates(level, CPU)
    monkeypatch.setattr(rates, "measure_rates", None)
    assert copy_rates(level, CPU) == found
    assert found.out_ns(2**30) > found.out_ns(2**20) > 0 and found.back_ns(2**30) > found.back_ns(2**20) > 0


def test_levels_have_rates_of_their_own(tmp_path: Path, own_cache: Path) -> None:
    copy_rates(Level(None, None), CPU)
    copy_rates(Level(tmp_path, None), CPU)
    assert set(RatesCache(device_key(CPU), own_cache.parent).load()) == {"cpu", f"disk {tmp_path.resolve()}"}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"format":"remat-copies","version":1,"device":"other","levels":{}}',
        '{"format":"remat-copies","version":1,"device":"DEVICE","levels":{"cpu":[1,2,3]}}',
        '{"format":"remat-copies","version":1,"device":"DEVICE","levels":{"cpu":[0,2,3,4]}}',
        '{"format":"remat-copies","version":1,"device":"DEVICE","levels":{"cpu":[1e999,2,3,4]}}',
    ],
)
def test_damaged_file_is_told_and_measured_again(content: str, own_cache: Path) -> None:
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text(content.replace("DEVICE", device_key(CPU)))
    with pytest.warns(UserWarning, match="its copies are measured again"):
        found = copy_rates(Level(None, None), CPU)
    assert RatesCache(device_key(CPU), own_cache.parent).load() == {"cpu": found}


def test_level_that_cannot_be_used_has_no_rates(tmp_path: Path) -> None:
    with pytest.raises(OffloadFailed, match="No file can be made"):
        copy_rates(Level(tmp_path / "none", None), CPU)


def test_time_of_a_copy_is_its_latency_and_its_bytes() -> None:
    found = CopyRates(2.0, 4.0, 10.0, 20.0)
    assert (found.out_ns(100), found.back_ns(100)) == (60.0, 45.0)
