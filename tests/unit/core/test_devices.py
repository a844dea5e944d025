"""The catalogue of devices: complete, extensible by file, and clear about what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from remat.core.devices import CONTEXT_BYTES, DeviceKind, find_device, known_devices, read_devices, smallest_that_holds
from remat.errors import FileFormatError, UnknownName

WANTED = [
    *("cpu", "V100-16GB", "V100-32GB", "T4", "A10", "L4", "L40S", "A100-40GB", "A100-80GB", "H100-80GB", "H100-PCIe"),
    *("H200", "B200", "RTX3090", "RTX4090", "RTX5090", "MI250X", "MI300X"),
]
DEVICE = {"name": "Own", "memory_bytes": 1 << 34, "gigabytes_per_second": 500, "teraflops": {"fp32": 20, "bf16": 100}}


def write(path: Path, *devices: object) -> Path:
    path.write_text(json.dumps({"format": "remat-devices", "version": 1, "devices": devices}))
    return path


def test_catalogue_has_the_usual_devices() -> None:
    assert list(known_devices()) == WANTED


@pytest.mark.parametrize("name", WANTED)
def test_figures_are_of_the_right_size(name: str) -> None:
    device = find_device(name)
    assert device.memory_bytes > 1 << 30
    assert 0 < device.usable_bytes <= device.memory_bytes
    assert device.rate("fp32") <= device.rate("tf32") <= device.rate("bf16") or "bf16" not in dict(device.flops_per_ns)


def test_rates_have_the_units_they_say() -> None:
    device = find_device("A100-40GB")
    assert device.rate("bf16") == pytest.approx(312e12 / 1e9)
    assert device.bytes_per_ns == pytest.approx(1555e9 / 1e9)
    assert device.usable_bytes == 40 * 2**30 - CONTEXT_BYTES


def test_a_dtype_without_units_of_its_own_runs_as_fp32() -> None:
    device = find_device("T4")
    assert device.rate("bf16") == device.rate("fp32") < device.rate("fp16")


def test_the_cpu_has_the_memory_of_this_machine() -> None:
    assert find_device("cpu").memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_the_case_of_letters_does_not_matter() -> None:
    assert find_device("h200") is not None and find_device("h200").name == "H200"


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="No device is called 'Z9'; known are cpu, V100-16GB,"):
        find_device("Z9")


def test_a_file_adds_devices_and_replaces_those_of_the_same_name(tmp_path: Path) -> None:
    path = write(tmp_path / "own.json", DEVICE, {**DEVICE, "name": "T4"})
    found = known_devices([path])
    assert found["Own"].kind is DeviceKind.CUDA
    assert found["T4"].memory_bytes == 1 << 34


def test_the_environment_names_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_DEVICES", str(write(tmp_path / "own.json", DEVICE)))
    assert find_device("own").bytes_per_ns == 500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "tpu"}, "`kind` must be cpu or cuda, found 'tpu'"),
        ({"teraflops": {"bf16": 1}}, "`fp32` is missing"),
        ({"teraflops": {"fp32": 1, "int3": 1}}, "no dtype is called 'int3'; known are fp32,"),
        ({"teraflops": {"fp32": 0}}, "`fp32` must be above 0"),
        ({"gigabytes_per_second": "fast"}, "`gigabytes_per_second` must be a finite number"),
        ({"memory_bytes": -1}, "`memory_bytes` must be an integer"),
    ],
)
def test_a_bad_field_is_refused_by_name(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write(tmp_path / "own.json", {**DEVICE, **change})
    with pytest.raises(FileFormatError, match=message):
        read_devices(path)


def test_the_smallest_device_with_room_is_found() -> None:
    devices = known_devices().values()
    found = smallest_that_holds(30 * 2**30, devices)
    assert found is not None and found.name == "V100-32GB"
    assert smallest_that_holds(2**50, devices) is None
