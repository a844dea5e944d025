"""Plans for a compiled GPT-2 at full size, made on any machine: what Inductor's code will need, and planning time.

The step is traced on fake tensors as a GPU would run it, planned for each budget, and lowered by Inductor without
compiling a kernel; the wrapper code is then gone through allocation by allocation. Times of kernels are rooflines of
the device named.

    python benchmarks/bench_compiled.py --layers 24 --budgets 12 8 6 5
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._subclasses.fake_tensor import FakeTensorMode

from remat.core.budget import format_bytes
from remat.core.devices import Device, find_device, known_devices
from remat.inductor._compat import compile_fx, compile_half, compile_settings, compiling_both_halves
from remat.inductor.choose import Choice, choose
from remat.inductor.compile import AS_PREDICTED
from remat.inductor.compiled import Compiled, recording
from remat.inductor.dry_run import dry_run
from remat.inductor.joint import Kind
from remat.inductor.loss_rewrite import chunks_for, rewrite_loss
from remat.inductor.partition import Cut, Partitioner, Uncut
from remat.inductor.predict import Rates
from remat.integrations.loss_only import LossOnly
from remat.integrations.transformers import masks_as_in_eager
from remat.pytorch._compat import log_messages_skipped, true_sizes_of_fused_layers
from remat.pytorch.cuda_rules import cuda_rules
from remat.pytorch.roofline import BANDWIDTH_SHARE, call_ns

GIB = 2**30


class _Lowered(Exception):
    """Both halves are there; nothing is run."""


@dataclass(frozen=True)
class Result:
    choice: Choice | None
    resident_bytes: int
    planning_s: float
    lowering_s: float
    forward: Compiled
    backward: Compiled


def lower(model: nn.Module, tokens: torch.Tensor, mode: FakeTensorMode, device: Device, budget: int | None) -> Result:
    """Plan for `budget` bytes, or leave the cut to torch, and have Inductor lower it."""
    found: list[Compiled] = []
    choices: list[Choice] = []
    planning = [0.0]
    resident = sum(item.numel() * item.element_size() for item in (*model.parameters(), *model.buffers(), tokens))

    def decide(uncut: Uncut) -> Cut | None:
        if budget is None:
            return None
        began = time.perf_counter()
        choices.append(choose(uncut.joint, rates_of(uncut, device), budget - resident))
        planning[0] = time.perf_counter() - began
        return Cut(choices[-1].saved, choices[-1].unrolled)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        rewrite_loss(graph, chunks_for)
        patches = {"custom_partitioner_fn": Partitioner(decide), "fx_graph_cache": False, **AS_PREDICTED}
        compile_fx(graph, inputs, inner_compile=recording(compile_half, found), config_patches=patches)
        raise _Lowered

    torch._dynamo.reset()
    began = time.perf_counter()
    with as_on(device, model, tokens), compiling_both_halves(), without_kernels():
        try:
            with torch.autocast("cpu", torch.bfloat16), mode:
                torch.compile(model, backend=backend, fullgraph=True)(input_ids=tokens, labels=tokens)
        except Exception:
            if len(found) < 2:
                raise
    taken = time.perf_counter() - began - planning[0]
    halves = sorted(found, key=lambda half: half.is_backward)
    return Result(choices[-1] if choices else None, resident, planning[0], taken, halves[0], halves[1])


def rates_of(uncut: Uncut, device: Device) -> Rates:
    alone = {}
    for number, node in enumerate(uncut.joint.nodes):
        if node.kind is Kind.ALONE and not node.is_part:
            fx = uncut.nodes[number]
            args, kwargs = torch.fx.node.map_arg((fx.args, fx.kwargs), lambda item: item.meta.get("val"))
            alone[number] = call_ns(device, fx.target, args, kwargs, fx.meta.get("val"))
    return Rates(device.bytes_per_ns * BANDWIDTH_SHARE, 3_000.0, alone, stores_heavy=True)


@contextmanager
def as_on(device: Device, model: nn.Module, tokens: torch.Tensor) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(cuda_rules(device))
        stack.enter_context(true_sizes_of_fused_layers())
        stack.enter_context(log_messages_skipped())
        stack.enter_context(masks_as_in_eager(model, (), {"input_ids": tokens, "labels": tokens}))
        yield


@contextmanager
def without_kernels() -> Iterator[None]:
    """C++ kernels are written but not compiled."""

    class Nothing:
        def __call__(self, *args: Any, **options: Any) -> None:
            """In place of a kernel."""

    replaced = {"cpp_pybinding": lambda self, *args, **options: Nothing(), "wait": lambda self, scope: None}
    before = {name: getattr(AsyncCompile, name) for name in replaced}
    for name, value in replaced.items():
        setattr(AsyncCompile, name, value)
    try:
        with compile_settings({"cpp.simdlen": 1}):
            yield
    finally:
        for name, value in before.items():
            setattr(AsyncCompile, name, value)


def main() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="H200")
    parser.add_argument("--budgets", type=float, nargs="*", default=[12.0, 8.0, 6.0, 5.0], help="in GiB")
    options = parser.parse_args()
    config = GPT2Config(n_layer=options.layers, n_embd=options.width, n_head=options.width // 64, use_cache=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = LossOnly(GPT2LMHeadModel(config))
        tokens = torch.randint(0, config.vocab_size, (options.batch, config.n_positions))
    device = find_device(options.device, known_devices(()))
    print("| budget | predicted peak | peak of the code | saved | planning s | tracing and lowering s |")
    print("|---|---|---|---|---|---|")
    for budget in (None, *options.budgets):
        result = lower(model, tokens, mode, device, None if budget is None else int(budget * GIB))
        timeline = dry_run(result.forward, result.backward, device=torch.device("cpu"))
        resident = result.resident_bytes
        predicted = format_bytes(resident + result.choice.prediction.peak_bytes) if result.choice else ""
        print(
            f"| {'torch chooses' if budget is None else f'{budget:g} GiB'} | {predicted} "
            f"| {format_bytes(resident + timeline.peak_bytes)} | {format_bytes(timeline.boundary_bytes)} "
            f"| {result.planning_s:.1f} | {result.lowering_s:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
