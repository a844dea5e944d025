"""One graph of a step, compiled by Inductor under a choice of what to save.

In: a graph as Dynamo gives it, its inputs, and who decides. Out: a `Built`: a function to call, and what Inductor made
for forward and backward. Both are made at once, so that what they need is known before anything runs.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from remat.inductor._compat.compiling import (
    compile_fx,
    compile_half,
    compile_settings,
    compiling_at_once,
    compiling_both_halves,
    compiling_outside_dynamo,
    generates_matmuls,
    leave_half,
    place_to_trace_in,
)
from remat.inductor._compat.kernels import (
    computing_where_told,
    holding_freed_buffers_up_to,
    joining_kernels_where,
    writing_over_what_ends,
)
from remat.inductor.dry_run.compiled import Compiled, recording
from remat.inductor.dry_run.run import OnCall, dry_run, tell_nobody
from remat.inductor.dry_run.timeline import KernelTimeline
from remat.inductor.dry_run.workspaces import Workspaces
from remat.inductor.halves import as_eager_runs_it
from remat.inductor.images import ImageLayout
from remat.inductor.joining import Room
from remat.inductor.partition import Decide, Partitioner
from remat.inductor.shapes.open_inputs import OpenInputs
from remat.inductor.stages import stage
from remat.inductor.travel import Travel
from remat.pytorch._compat.symbols import Symbols
from remat.pytorch._compat.tracing import many_results_compiled, opaque_custom_backwards

AS_PREDICTED = {"reorder_for_peak_memory": False, "max_fusion_size": 8, "realize_acc_reads_threshold": 24}
"""Kernels run in the order of the graph, which the prediction knows; Inductor would guess another. A kernel computes
few tensors: Inductor would make again what many layers need in one kernel, and hold it until the last of them. What has
read much on the way is not put into memory for that: a gradient would be kept half-way, and all that the
rest is computed from for a second kernel."""
HELD_BYTES = {"cuda": 2**20}
"""Memory that a kernel needs no more is given back at once; Inductor would hold it for the next tensor of that size. On
CUDA it may for so much, and where memory is far from its peak: calling the allocator takes the host longer than small
tensors are worth."""
HELD_SHARE = 2**-10
"""The same, of all that the code may need: of what is small beside that."""
WITHOUT_CHECKS = {"size_asserts": False, "alignment_asserts": False, "scalar_asserts": False}
"""Inductor's code would look at the shape of every tensor that it gets or makes, in every step."""


@dataclass(frozen=True, slots=True)
class Built:
    call: Callable[..., Any]
    forward: Compiled
    backward: Compiled | None
    away_bytes: int = 0
    """Of what forward saves, what spends a while on the host."""
    symbols: Symbols | None = None
    """For sizes that are left open, with all that compiling took for granted of them."""

    def timeline(self, device: torch.device, workspaces: Workspaces, on_call: OnCall = tell_nobody) -> KernelTimeline:
        """The memory of a forward and backward, beyond what is there when they begin."""
        return dry_run(
            self.forward,
            self.backward,
            device=device,
            workspace_of=workspaces,
            on_call=on_call,
        )


@contextlib.contextmanager
def compiling_as_predicted(device_type: str, room: Room | None = None) -> Iterator[None]:
    """Inductor's settings for code that needs what was predicted; `room` says where it may need more."""
    held = HELD_BYTES.get(device_type)
    if held is not None and room is not None:
        held = min(held, int(HELD_SHARE * room.most_bytes))
    settings = {**AS_PREDICTED, "allow_buffer_reuse": held is not None}
    joining = joining_kernels_where(room.for_one) if room is not None else contextlib.nullcontext()
    holding = holding_freed_buffers_up_to(held or 0, room.to_hold if room is not None else None)
    with joining, holding, writing_over_what_ends(), computing_where_told(), compile_settings(settings):
        yield


def build(
    module: GraphModule,
    inputs: Sequence[Any],
    decide: Decide,
    device: torch.device,
    asked: Mapping[str, Any],
    travel: Travel | None = None,
    opened: OpenInputs | None = None,
) -> Built | None:
    """Compile a copy of `module`: what was compiled once can be compiled again under another choice.

    `asked` are settings of Inductor that the user wants. Some of what is saved may `travel` to the host and back. Sizes
    may be left open, as `opened` says. None where `decide` says that nothing is to be compiled.
    """
    found: list[Compiled] = []
    images, mode = ImageLayout(device), place_to_trace_in()
    given, symbols = opened.stand_ins(inputs, mode) if opened is not None else (list(inputs), None)
    # A kernel for a CPU would cast all of them at a time; a matmul that Inductor writes itself casts what it computes.
    casts_late = device.type == "cuda" and not generates_matmuls(asked)
    partitioner = Partitioner(decide, travel, symbols, casts_late=casts_late)
    compile_and_keep = recording(compile_half, found)

    def compile_if_wanted(half: GraphModule, half_inputs: Sequence[Any], **options: Any) -> Any:
        if not partitioner.is_wanted:
            return leave_half(half, half_inputs, **options)
        is_backward = bool(options.get("is_backward"))
        rooms = partitioner.rooms
        room = rooms.of(is_backward=is_backward) if rooms is not None else None
        # Where torch chooses what to save, its code is torch's as a whole.
        ours = contextlib.nullcontext() if partitioner.is_torchs else compiling_as_predicted(device.type, room)
        compiling = stage(f"Compiling the {'backward' if is_backward else 'forward'}")
        with ours, images.compiling(half, is_backward=is_backward), compiling:
            return compile_and_keep(half, half_inputs, **options)

    with compiling_both_halves(), compiling_outside_dynamo(mode), what_torch_refuses(module):
        call = compile_fx(
            copy.deepcopy(module),
            given,
            inner_compile=as_eager_runs_it(compile_if_wanted),
            config_patches={**asked, "custom_partitioner_fn": partitioner, **WITHOUT_CHECKS},
            ignore_shape_env=True,
        )
    if not partitioner.is_wanted:
        return None
    forward = next(item for item in found if not item.is_backward)
    backward = next((item for item in found if item.is_backward), None)
    return Built(call, forward, backward, partitioner.away_bytes, symbols)


def build_plainly(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """As torch.compile would."""
    with compiling_at_once(), what_torch_refuses(module):
        call: Callable[..., Any] = compile_fx(
            copy.deepcopy(module), list(inputs), inner_compile=as_eager_runs_it(compile_half)
        )
    return call


@contextlib.contextmanager
def what_torch_refuses(module: GraphModule) -> Iterator[None]:
    """Compile steps that write to thousands of buffers, and custom ops whose backward reads data, too."""
    with many_results_compiled(), opaque_custom_backwards(node.target for node in module.graph.nodes):
        yield
