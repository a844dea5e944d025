"""How fast tensors go to a level below the device and come back, measured once and kept on disk as costs of ops are.

In: a level and a device. Out: `CopyRates`. Copies go both ways at once, beside computations on the device, as they will
in a step: each direction takes from the other, and both from what computes. The median of a few rounds counts.
"""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from remat.core.cache_file import CacheFile, cache_folder
from remat.core.document import Record
from remat.errors import FileFormatError
from remat.pytorch._compat.modes import without_modes
from remat.pytorch.costs.op_costs import device_key
from remat.pytorch.host.levels import Level
from remat.pytorch.host.store import Store

FORMAT, VERSION = "remat-copies", 2
PROBE_BYTES, SMALL_BYTES = 64 * 2**20, 4096
PROBES = 4
"""Tensors each way in a round."""
ROUNDS = 5
BUSY_SIZE = 2048
"""Of the square of numbers with which the device is kept busy."""
BUSY_KERNELS = 1000
"""So many are queued on CUDA before the copies: a thread that launches them meanwhile would keep the host from asking
for copies."""


@dataclass(frozen=True, slots=True)
class CopyRates:
    """What a copy takes while the other direction and the device are busy."""

    out_bytes_per_ns: float
    back_bytes_per_ns: float
    out_latency_ns: float
    back_latency_ns: float

    def out_ns(self, size_bytes: int) -> float:
        return self.out_latency_ns + size_bytes / self.out_bytes_per_ns

    def back_ns(self, size_bytes: int) -> float:
        return self.back_latency_ns + size_bytes / self.back_bytes_per_ns


def copy_rates(level: Level, device: torch.device) -> CopyRates:
    """Measured where nobody has before; raises `OffloadFailed` where the level cannot be used."""
    cache = RatesCache(device_key(device), cache_folder() / "copies")
    key = "cpu" if level.folder is None else f"disk {level.folder.resolve()}"
    known = cache.load().get(key)
    if known is None:
        with torch.no_grad(), without_modes():
            # A store of its own: the user's budget is not for probes.
            known = measure_rates(Level(level.folder, None).open(device), device, is_beside(level, device))
        cache.add({key: known})
    return known


def is_beside(level: Level, device: torch.device) -> bool:
    """Whether copies run beside computations; the memory of a CPU is the host's, which copies it itself."""
    return device.type == "cuda" or level.folder is not None


def measure_rates(store: Store, device: torch.device, beside: bool) -> CopyRates:
    out_ns, back_ns = _Probe(store, device, PROBE_BYTES, beside).times()
    out_latency_ns, back_latency_ns = _Probe(store, device, SMALL_BYTES, beside).times()
    # Most of a small copy is the host's work, which goes on while a large one is moved: all of that is the link's.
    return CopyRates(PROBE_BYTES / max(out_ns, 1.0), PROBE_BYTES / max(back_ns, 1.0), out_latency_ns, back_latency_ns)


class _Probe:
    """Copies of one size, timed."""

    def __init__(self, store: Store, device: torch.device, size_bytes: int, beside: bool) -> None:
        self._store, self._device, self._beside = store, device, beside
        self._tensors = [torch.zeros(size_bytes, dtype=torch.uint8, device=device) for _ in range(PROBES)]

    def times(self) -> tuple[float, float]:
        """Nanoseconds of one copy each way: alone they tell how they compare, together how long both take."""
        rounds = [self._round() for _ in range(ROUNDS)]
        out, back, both = (statistics.median(column) for column in zip(*rounds, strict=True))
        slower = max(1.0, both / max(out, back)) if self._beside else 1.0
        return out * slower / PROBES, back * slower / PROBES

    def _round(self) -> tuple[float, float, float]:
        """Out, back, and one lot each way at once."""
        store, tickets = self._store, [self._store.copy_out(tensor) for tensor in self._tensors]
        self._finish()

        def out() -> None:
            # Released when a disk has all of it, too.
            for ticket in [store.copy_out(tensor) for tensor in self._tensors]:
                store.release(ticket)

        def back() -> None:
            for ticket in tickets:
                store.copy_back(ticket)
            for ticket in tickets:
                ticket.wait_back()

        def both() -> None:
            sent = [store.copy_out(tensor) for tensor in self._tensors]
            back()
            for ticket in sent:
                store.release(ticket)

        return self._time(out), self._time(back), self._time(both)

    def _time(self, call: Callable[[], None]) -> float:
        with _busy(self._device) if self._beside else nullcontext():
            begin = time.perf_counter_ns()
            call()
            self._finish()
            return float(time.perf_counter_ns() - begin)

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


@contextmanager
def _busy(device: torch.device) -> Iterator[None]:
    """Something is computed meanwhile."""
    size = BUSY_SIZE if device.type == "cuda" else BUSY_SIZE // 8
    numbers, results = torch.ones(size, size, device=device), torch.empty(size, size, device=device)
    # Products would take a workspace for each stream, and keep it.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for _ in range(BUSY_KERNELS):
                torch.lgamma(numbers, out=results)
        yield
        torch.cuda.synchronize(device)
        return
    over = threading.Event()

    def compute() -> None:
        with torch.no_grad():
            while not over.is_set():
                torch.lgamma(numbers, out=results)

    thread = threading.Thread(target=compute, name="remat-busy")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True, slots=True)
class RatesCache:
    """Rates of one device, by level."""

    device_key: str
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', self.device_key)}.json"

    def load(self) -> dict[str, CopyRates]:
        return self._file().read(self._decode) or {}

    def add(self, measured: Mapping[str, CopyRates]) -> None:
        """Merge `measured` into the file; what another process measured meanwhile is kept."""
        self._file().update(lambda: self._encode({**self.load(), **measured}))

    def _file(self) -> CacheFile:
        return CacheFile(self.path, FORMAT, VERSION, "its copies are measured again")

    def _encode(self, rates: Mapping[str, CopyRates]) -> dict[str, object]:
        return {"device": self.device_key, "levels": {key: list(astuple(found)) for key, found in rates.items()}}

    def _decode(self, record: Record) -> dict[str, CopyRates]:
        if record.text("device") != self.device_key:
            raise FileFormatError(f"{record.where} was written for another device.")
        levels = record.record("levels")
        return {key: _decode_rates(levels, key) for key in levels.fields}


def _decode_rates(levels: Record, key: str) -> CopyRates:
    found = levels.numbers(key)
    if len(found) != 4 or not (found[0] > 0 and found[1] > 0):
        raise FileFormatError(f"{levels.where}: `{key:.60}` must be two rates above 0 and two latencies.")
    return CopyRates(*found)
