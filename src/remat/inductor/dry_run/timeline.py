"""Memory of a compiled step over time: what each kernel call left in memory, and what the peak is made of.

Made by `dry_run`; read by planners and pictures. Bytes are as the device's allocator counts them: whole blocks of 512
bytes on CUDA, exact bytes elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.results.profile import Phase
from remat.errors import RematError


class CannotFollow(RematError):
    """Compiled code that cannot be gone through without computing; the step has to be measured instead."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel or extern call, in the order in which they run."""

    name: str
    """As `triton_poi_fused_gelu_3`, `extern_kernels.mm` or `aten.convolution_backward.default`."""
    phase: Phase
    line: int
    """Of the wrapper's source, from 1."""
    origins: tuple[str, ...]
    """The nodes of the traced program that it computes, where Inductor says so."""
    made_bytes: int
    """What was allocated for it and outlives it."""
    workspace_bytes: int
    """What it needs for itself while it runs, where the caller knows that."""
    live_bytes: int
    """The most that is in memory from the call before until it is over, workspace and resident bytes included."""


@dataclass(frozen=True, slots=True)
class KernelBuffer:
    """One storage that is in memory at the peak."""

    name: str
    """The variable that holds it in the wrapper at that moment, or held it last."""
    size_bytes: int
    phase: Phase
    """When it was allocated."""
    made_by: str
    """The call that computed what is in it; empty for what autograd hands in."""
    origins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BufferLife:
    """One storage over the step; places are those of calls."""

    size_bytes: int
    created: int
    """The first call that finds it in memory."""
    freed: int
    """The last call that does; the number of calls where it outlives the step."""
    made_by: str
    """The call that first finds it, which mostly computes it."""


@dataclass(frozen=True, slots=True)
class KernelTimeline:
    """A forward and, where there is one, its backward."""

    calls: tuple[KernelCall, ...]
    peak_bytes: int
    peak_call: int
    """The place of the peak in `calls`."""
    resident_bytes: int
    """In memory all the time; part of every `live_bytes`."""
    boundary_bytes: int
    """In memory between forward and backward: outputs and what is saved, resident bytes included."""
    end_bytes: int
    """In memory when backward is over: gradients and outputs, resident bytes included."""
    slack_bytes: int
    """How far the caching allocator's count may exceed the sum of live bytes, because it hands out larger blocks."""
    alive: tuple[KernelBuffer, ...]
    """At the peak, largest first; with the workspace and resident bytes they add up to `peak_bytes`."""
    lives: tuple[BufferLife, ...] = ()
    """Of every storage that a call finds in memory."""
