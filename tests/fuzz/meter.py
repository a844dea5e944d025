"""A second opinion on memory: bytes that torch's allocator has handed out, counted without the profiler.

On the CPU a few lines of C stand between torch and its own `alloc_cpu` and `free_cpu`. They are compiled when they are
first needed; `open_meter` gives None where that is not possible, and `why_not` says why. On CUDA the allocator counts.

What is compared with Remat's peak is `peak - start + present`: blocks that were handed out before the step and have
nothing to do with it are in both `peak` and `start`; `present` is what the step starts with (parameters, buffers,
gradients, optimizer state, inputs), which the caller adds up.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch

SOURCE = Path(__file__).with_name("meter.c")
ALLOC, FREE = "_ZN3c109alloc_cpuEm", "_ZN3c108free_cpuEPv"


class Meter(Protocol):
    def begin(self) -> int:
        """Bytes handed out now; the peak starts from there."""
        ...

    def peak_bytes(self) -> int:
        """The most bytes that were handed out at once since `begin`."""
        ...


class CpuMeter:
    def __init__(self, library: Any) -> None:
        self._library = library
        for name in ("meter_current", "meter_peak"):
            getattr(library, name).restype = ctypes.c_int64

    def begin(self) -> int:
        self._library.meter_reset()
        return int(self._library.meter_current())

    def peak_bytes(self) -> int:
        return int(self._library.meter_peak())


class CudaMeter:
    def begin(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


class NoMeter(Exception):
    """Why there is none."""


def open_meter(device: str = "cpu") -> Meter | None:
    """The meter of this process, or None."""
    if device == "cuda":
        return CudaMeter()
    found = _cpu_meter()
    return None if isinstance(found, NoMeter) else found


def why_not() -> str:
    """Why this process has no meter for the CPU; empty where it has one."""
    found = _cpu_meter()
    return str(found) if isinstance(found, NoMeter) else ""


@functools.cache
def _cpu_meter() -> CpuMeter | NoMeter:
    try:
        return _install()
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        return NoMeter(f"{type(error).__name__}: {error}")
    except NoMeter as reason:
        return reason


def _install() -> CpuMeter:
    with tempfile.TemporaryDirectory() as folder:
        library = ctypes.CDLL(str(_compile(Path(folder))))
    torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    addresses = [ctypes.cast(getattr(torch_library, name), ctypes.c_void_p) for name in (ALLOC, FREE)]
    if not library.meter_install(*addresses):
        raise NoMeter("this torch does not call its allocator through a table of addresses")
    return CpuMeter(library)


def _compile(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NoMeter("there is no C compiler")
    name = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    target = folder / f"meter-{name}.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(target), str(SOURCE), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise NoMeter(f"{compiler} failed: {(done.stderr.strip().splitlines() or [''])[-1]}")
    return target
