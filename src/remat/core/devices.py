"""The catalogue of devices: how much memory each has, and how fast it is.

In: `devices.json` of this package and, after it, the files a user names, which add devices or replace them by name.
Out: `Device`s by name. Figures are facts from data sheets: peaks that no real program reaches, which is why the
roofline that reads them has factors of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from remat.core.document import Record, read_document
from remat.errors import FileFormatError, UnknownName

FORMAT, VERSION = "remat-devices", 1
FILES_VARIABLE = "REMAT_DEVICES"
"""Files to read after the catalogue, separated as those of PATH are."""
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
CONTEXT_BYTES = 1 << 29
"""What a process takes on an accelerator before its first tensor: driver context, kernels, libraries."""


class DeviceKind(StrEnum):
    """Whose kernels and allocator a device uses in PyTorch; ROCm cards are `cuda` there too."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    kind: DeviceKind
    memory_bytes: int
    bytes_per_ns: float
    flops_per_ns: tuple[tuple[str, float], ...]
    """Dense peak rates, as (dtype, rate)."""
    matmul_workspace_bytes: int = 0
    """What its matrix library takes from the allocator at the first product of a thread and never gives back."""
    note: str = ""
    host_bytes_per_ns: float = 0.0
    """Of its link to the host, each way; 0 where nothing is known of it."""

    @property
    def usable_bytes(self) -> int:
        """What tensors can have of its memory."""
        return max(0, self.memory_bytes - (CONTEXT_BYTES if self.kind is DeviceKind.CUDA else 0))

    def rate(self, dtype: str) -> float:
        """Peak rate in FLOPs per nanosecond; a dtype without units of its own is computed in fp32."""
        rates = dict(self.flops_per_ns)
        return rates.get(dtype, rates["fp32"])


def known_devices(files: Iterable[Path] = ()) -> dict[str, Device]:
    """The catalogue, then the files of `$REMAT_DEVICES`, then `files`."""
    chosen = [Path(name) for name in os.environ.get(FILES_VARIABLE, "").split(os.pathsep) if name]
    found: dict[str, Device] = {}
    for path in (Path(__file__).with_name("devices.json"), *chosen, *files):
        found.update((device.name, device) for device in read_devices(path))
    return found


def find_device(name: str, devices: Mapping[str, Device] | None = None) -> Device:
    """The device called `name`, whatever the case of its letters."""
    devices = known_devices() if devices is None else devices
    for known, device in devices.items():
        if known.lower() == name.lower():
            return device
    raise UnknownName(
        f"No device is called {name!r}; known are {', '.join(devices)}. Describe others in a file (--devices)."
    )


def smallest_that_holds(size_bytes: int, devices: Iterable[Device]) -> Device | None:
    """The accelerator with least memory that has room for `size_bytes`, or None."""
    large = [item for item in devices if item.kind is DeviceKind.CUDA and item.usable_bytes >= size_bytes]
    return min(large, key=lambda item: item.memory_bytes, default=None)


def read_devices(path: Path) -> tuple[Device, ...]:
    record = read_document(path, {FORMAT: VERSION})
    return tuple(_decode(item) for item in record.records("devices"))


def _decode(record: Record) -> Device:
    kind = record.text("kind", DeviceKind.CUDA)
    if kind not in tuple(DeviceKind):
        raise FileFormatError(f"{record.where}: `kind` must be {' or '.join(DeviceKind)}, found {kind!r}; correct it.")
    memory = record.integer("memory_bytes")
    return Device(
        name=record.text("name"),
        kind=DeviceKind(kind),
        memory_bytes=memory or _memory_of_this_machine(),
        bytes_per_ns=_positive(record, "gigabytes_per_second"),
        flops_per_ns=_rates(record.record("teraflops")),
        matmul_workspace_bytes=record.integer("matmul_workspace_bytes", 0),
        note=record.text("note", ""),
        host_bytes_per_ns=record.number("host_gigabytes_per_second", 0.0),
    )


def _rates(record: Record) -> tuple[tuple[str, float], ...]:
    unknown = [name for name in record.fields if name not in DTYPES]
    if unknown:
        raise FileFormatError(f"{record.where}: no dtype is called {unknown[0]!r}; known are {', '.join(DTYPES)}.")
    rates = {name: _positive(record, name) for name in DTYPES if name in record.fields}
    if "fp32" not in rates:
        raise FileFormatError(f"{record.where}: `fp32` is missing; other dtypes fall back to it: state its rate.")
    # A teraflop per second is a thousand FLOPs per nanosecond.
    return tuple((name, rate * 1e3) for name, rate in rates.items())


def _positive(record: Record, key: str) -> float:
    found = record.number(key)
    if found <= 0:
        raise FileFormatError(f"{record.where}: `{key}` must be above 0, found {found:g}; correct it.")
    return found


def _memory_of_this_machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
