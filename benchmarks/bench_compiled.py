"""Plans for compiled models at full size, made on any machine: what Inductor's code will need, and planning time.

The step is traced on fake tensors as a GPU would run it, planned for each budget, and lowered by Inductor without
compiling a kernel; the wrapper code is then gone through allocation by allocation. Where Triton is installed that is
the code for a GPU, elsewhere the one for a CPU. Times of kernels are rooflines of the device named; --shake draws
others at random, for plans that another device would be given. Budgets are bytes, or shares of the way from what the
leanest plan needs to what the fastest does; --peers adds what people do by hand, and plans at the peaks of that.

    python -m benchmarks.bench_compiled --models gpt2-medium llama-1b --budgets 12 8 --shake 5
    python -m benchmarks.bench_compiled --models convnextv2 gemma2 --budgets --shares 0 0.4 --peers
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from benchmarks import as_gpu
from benchmarks.frontier.models import MODELS
from benchmarks.frontier.unseen import UNSEEN
from benchmarks.frontier.ways import Blocks, prepare_blocks
from benchmarks.frontier.workloads import Workload
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.async_compile import AsyncCompile
from torch._subclasses.fake_tensor import FakeTensorMode

from remat.core.budget import format_bytes
from remat.core.devices import Device, find_device, known_devices
from remat.errors import InfeasibleBudget
from remat.inductor._compat.compiling import compile_fx, compile_half, compile_settings, compiling_both_halves
from remat.inductor.compile import compiling_as_predicted, what_torch_refuses
from remat.inductor.dry_run.compiled import Compiled, recording
from remat.inductor.dry_run.run import dry_run
from remat.inductor.dry_run.timeline import KernelTimeline
from remat.inductor.images import ImageLayout
from remat.inductor.joining import rooms_of
from remat.inductor.loss.rewrite import chunks_for, rewrite_loss
from remat.inductor.model.choose import Choice, choose
from remat.inductor.model.joint import Joint, Kind
from remat.inductor.model.program import MeasuredRates
from remat.inductor.model.rates import COMPUTED_ON_CUDA, KERNEL_NS
from remat.inductor.partition import Cut, Instead, Partitioner, Uncut
from remat.integrations.masks import masks_as_in_eager
from remat.pytorch._compat.dynamo import log_messages_skipped, positions_looked_at
from remat.pytorch._compat.fakes import true_sizes_of_fused_layers
from remat.pytorch._compat.layer_drop import draws_compared
from remat.pytorch.costs.roofline import BANDWIDTH_SHARE, call_ns
from remat.pytorch.estimate.cuda_rules import cuda_rules

GIB = 2**30
ALL = {**MODELS, **UNSEEN}
SHAKEN = (0.6, 1.6)
"""Between these a kernel's time is taken for its roofline."""


@dataclass(frozen=True)
class Asked:
    """A budget: GiB, a share of the way from the leanest plan to the fastest, or none, for torch's own cut."""

    gib: float | None = None
    share: float | None = None
    blocks: Blocks = Blocks.AS_THEY_ARE
    """What is done by hand before torch cuts."""

    def __str__(self) -> str:
        if self.share is not None:
            return f"{self.share:g} of the way"
        if self.gib is None:
            return _BY_HAND[self.blocks]
        return f"{self.gib:.4g} GiB"

    @property
    def is_planned(self) -> bool:
        return self.gib is not None or self.share is not None

    def of(self, joint: Joint, rates: MeasuredRates, resident: int) -> int:
        """Bytes beyond what is resident."""
        if self.gib is not None:
            return int(self.gib * GIB) - resident
        assert self.share is not None
        return between(joint, rates, self.share)


_BY_HAND = {
    Blocks.AS_THEY_ARE: "torch chooses",
    Blocks.CHECKPOINT: "checkpoint per block",
    Blocks.MATMULS: "selective: all matmuls",
}


class _Lowered(Exception):
    """Both halves are there; nothing is run."""


@dataclass(frozen=True)
class Conditions:
    device: Device
    mode: AbstractContextManager[Any]
    """In which the step is traced."""
    for_gpu: bool
    """Whether the code is a GPU's."""
    seed: int | None
    """Of kernels' times, where they are not rooflines."""


@dataclass(frozen=True)
class Result:
    choice: Choice | None
    resident_bytes: int
    planning_s: float
    lowering_s: float
    kernels: int
    """Distinct ones, which Triton or a C++ compiler has to compile."""
    needed: KernelTimeline
    """Of the code, beyond what is resident."""

    @property
    def peak_bytes(self) -> int:
        return self.resident_bytes + self.needed.peak_bytes


def lower(workload: Workload, asked: Asked, conditions: Conditions) -> Result:
    """Plan for a budget, or leave the cut to torch, and have Inductor lower it."""
    found: list[Compiled] = []
    choices: list[Choice] = []
    planning = [0.0]
    model, inputs, labels = workload.model, workload.inputs, workload.labels
    held = (*model.parameters(), *model.buffers(), *dict.fromkeys((inputs, labels)))
    resident = sum(item.numel() * item.element_size() for item in held)
    is_planned = asked.is_planned

    def decide(uncut: Uncut) -> Cut | Instead:
        if not is_planned:
            return Instead.TORCHS_CUT
        rates = rates_of(uncut, conditions)
        budget = asked.of(uncut.joint, rates, resident)
        began = time.perf_counter()
        choices.append(choose(uncut.joint, rates, budget))
        planning[0] = time.perf_counter() - began
        return Cut(choices[-1].saved, choices[-1].unrolled, rooms_of(uncut.joint, choices[-1], budget))

    compiling = compiler(decide, found, for_gpu=conditions.for_gpu, is_planned=is_planned)

    def backend(graph: torch.fx.GraphModule, given: Any) -> Any:
        compiling(graph, given)
        raise _Lowered

    torch._dynamo.reset()
    began = time.perf_counter()
    with as_on(conditions.device, workload), without_kernels():
        try:
            with torch.autocast("cpu", torch.bfloat16), conditions.mode:
                torch.compile(model, backend=backend, fullgraph=True)(inputs, labels)
        except Exception:
            if len(found) < 2:
                raise
    taken = time.perf_counter() - began - planning[0]
    kernels = sum(half.source.count("= async_compile.") for half in found)
    forward, backward = sorted(found, key=lambda half: half.is_backward)
    needed = dry_run(forward, backward, device=torch.device("cpu"))
    return Result(choices[-1] if choices else None, resident, planning[0], taken, kernels, needed)


def compiler(
    decide: Callable[[Uncut], Cut | Instead], found: list[Compiled], *, for_gpu: bool, is_planned: bool
) -> Callable[[torch.fx.GraphModule, Any], Any]:
    """A backend of torch.compile that has Inductor compile both halves as a session would; both are put in `found`."""
    kind = "cuda" if for_gpu else "cpu"

    def backend(graph: torch.fx.GraphModule, given: Any) -> Any:
        rewrite_loss(graph, chunks_for)
        partitioner = Partitioner(decide, casts_late=for_gpu)
        images = ImageLayout(torch.device(kind))
        patches = {"custom_partitioner_fn": partitioner, "fx_graph_cache": False}

        def compile_joined(half: Any, inputs: Any, **options: Any) -> Any:
            rooms, is_backward = partitioner.rooms, bool(options.get("is_backward"))
            room = rooms.of(is_backward=is_backward) if rooms is not None else None
            ours = compiling_as_predicted(kind, room) if is_planned else nullcontext()
            with ours, images.compiling(half, is_backward=is_backward):
                return compile_half(half, inputs, **options)

        with compiling_both_halves(), what_torch_refuses(graph):
            return compile_fx(graph, given, inner_compile=recording(compile_joined, found), config_patches=patches)

    return backend


def between(joint: Joint, rates: MeasuredRates, share: float) -> int:
    """Bytes that are `share` of the way from what the leanest plan needs to what the fastest does."""
    try:
        least = choose(joint, rates, 0).prediction.peak_bytes
    except InfeasibleBudget as refused:
        least = refused.min_budget
    most = choose(joint, rates, 2**50).prediction.peak_bytes if share else least
    return least + int(share * (most - least))


def rates_of(uncut: Uncut, conditions: Conditions) -> MeasuredRates:
    """Rooflines of the device, or something like them."""
    device, start_ns = conditions.device, KERNEL_NS["cuda"]
    alone = {}
    for number, node in enumerate(uncut.joint.nodes):
        if node.kind is Kind.ALONE and not node.is_part:
            fx = uncut.nodes[number]
            args, kwargs = torch.fx.node.map_arg((fx.args, fx.kwargs), lambda item: item.meta.get("val"))
            alone[number] = call_ns(device, fx.target, args, kwargs, fx.meta.get("val")) + start_ns
    if conditions.seed is not None:
        alone = shaken(uncut.joint, alone, random.Random(conditions.seed))
    on_cpu = not conditions.for_gpu
    speed = device.bytes_per_ns * BANDWIDTH_SHARE
    return MeasuredRates(speed, start_ns, alone, stores_heavy=on_cpu, sums_in_place=on_cpu, **COMPUTED_ON_CUDA)


def shaken(joint: Joint, alone_ns: dict[int, float], rng: random.Random) -> dict[int, float]:
    """Other times; kernels of one kind and size keep having the same."""
    factors: dict[tuple[Any, ...], float] = {}
    for number in alone_ns:
        node = joint.nodes[number]
        factors.setdefault((node.target, node.size_bytes, len(node.reads)), rng.uniform(*SHAKEN))
    nodes = joint.nodes
    return {
        number: time_ns * factors[nodes[number].target, nodes[number].size_bytes, len(nodes[number].reads)]
        for number, time_ns in alone_ns.items()
    }


@contextmanager
def as_on(device: Device, workload: Workload) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(cuda_rules(device))
        stack.enter_context(true_sizes_of_fused_layers())
        stack.enter_context(log_messages_skipped())
        stack.enter_context(masks_as_in_eager())
        stack.enter_context(positions_looked_at())
        stack.enter_context(draws_compared())
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


def report(name: str, asked: Asked, result: Result) -> str:
    """A line of the table."""
    resident, choice = result.resident_bytes, result.choice
    predicted = format_bytes(resident + choice.prediction.peak_bytes) if choice else ""
    apart = f"{result.peak_bytes / (resident + choice.prediction.peak_bytes) - 1:+.2%}" if choice else ""
    cells = (
        name,
        str(asked),
        predicted,
        format_bytes(result.peak_bytes),
        apart,
        format_bytes(result.needed.boundary_bytes),
        f"{choice.prediction.time_ns / 1e6:.1f}" if choice else "",
        f"{result.planning_s:.1f}",
        f"{result.lowering_s:.1f}",
        f"{result.kernels}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    options = _options()
    if options.for_gpu:
        as_gpu.take_cpu_for_gpu()
    device = find_device(options.device, known_devices(()))
    print(f"Code for a {'GPU' if options.for_gpu else 'CPU'}, times of {device.name}.\n")
    print(
        "| model | budget | predicted peak | peak of the code | apart | saved | predicted ms | planning s | lowering s "
        "| kernels |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in options.models:
        # Small ones are made: some models look at numbers when they are built.
        mode = nullcontext() if name in UNSEEN else FakeTensorMode(allow_non_fake_inputs=True)
        conditions = Conditions(device, mode, options.for_gpu, options.shake)
        by_hand = [] if options.plans_only else list(_BY_HAND if options.peers else [Blocks.AS_THEY_ARE])
        peaks = [*options.budgets]
        for asked in (Asked(blocks=blocks) for blocks in by_hand):
            try:
                result = lower(_workload(name, options.batch, mode, asked.blocks), asked, conditions)
            except (ValueError, TorchDynamoException) as error:  # No repeated blocks, or such that cannot be traced so.
                print(f"| {name} | {asked} | {str(error).strip().splitlines()[0]} |", flush=True)
                continue
            print(report(name, asked, result), flush=True)
            if options.peers:
                peaks.append(result.peak_bytes / GIB)
        workload = _workload(name, options.batch, mode)
        for asked in (*map(Asked, peaks), *(Asked(share=at) for at in options.shares)):
            print(report(name, asked, lower(workload, asked, conditions)), flush=True)


def _workload(
    name: str, batch: int | None, mode: AbstractContextManager[Any], blocks: Blocks = Blocks.AS_THEY_ARE
) -> Workload:
    with mode, _normal_throughout():
        made = ALL[name].build(batch or ALL[name].batch)
    made.model.train()
    prepare_blocks(made.model, blocks)
    return made


@contextmanager
def _normal_throughout() -> Iterator[None]:
    """No normal distribution is cut off: that looks at numbers, which fake tensors lack."""
    # What it calls: models may have taken hold of `trunc_normal_` itself.
    with patch.object(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor.normal_()):
        yield


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(ALL), default=["gpt2-medium"])
    parser.add_argument("--batch", type=int, help="another batch size than the model's own")
    parser.add_argument("--device", default="H200")
    parser.add_argument("--budgets", type=float, nargs="*", default=[12.0, 8.0, 6.0, 5.0], help="in GiB")
    parser.add_argument("--shares", type=float, nargs="*", default=[], help="see above")
    parser.add_argument("--plans-only", action="store_true", help="without torch's own cut beside them")
    parser.add_argument("--peers", action="store_true", help="also what people do by hand, and plans at its peaks")
    parser.add_argument("--for-gpu", action=argparse.BooleanOptionalAction, default=as_gpu.is_possible())
    parser.add_argument("--shake", type=int, metavar="SEED", help="times of kernels drawn at random")
    return parser.parse_args()


if __name__ == "__main__":
    main()
