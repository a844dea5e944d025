"""A model whose Adam state alone does not fit: trained within a limit of device memory, beside what torch offers.

    python -m benchmarks.bench_optimizer_offload
    python -m benchmarks.bench_optimizer_offload --device cpu --width 64 --depth 2 --vocabulary 64 --length 16 --heads 2

A GPT of 3 billion parameters with checkpoints per block, bf16 weights and fp32 master weights, under a limit set in the
allocator. Ways: `remat` (`remat.offload_optimizer` with master weights), `remat-in-backward` (the same, with updates
that begin in backward), `fsdp` (fully_shard on one rank with `CPUOffloadPolicy`, whose weights and update are the
CPU's), and `resident` (the same update as ours with everything on the device and no limit: what the limit costs). Each
in a process of its own, one after the other. The table has tokens per second, the step and the part of it that the
optimizer takes after backward, peaks of device and host memory, and the losses.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.runs import save_results
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from remat.core.budget import parse_budget
from remat.zoo.gpt import GPT

GIB = 2**30
OUTPUT = Path(__file__).parent / "results" / "optimizer_offload_cuda.json"


@dataclass(frozen=True, slots=True)
class Row:
    way: str
    parameters: int
    tokens_per_s: float
    step_ms: float
    optimizer_ms: float
    peak_bytes: int
    reserved_bytes: int
    host_bytes: int
    first_loss: float
    last_loss: float
    ready_s: float


@dataclass(frozen=True, slots=True)
class Training:
    """A model that is ready, and what one update of it does."""

    model: nn.Module
    optimizer: Any

    def step(self, data: list[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> tuple[float, float]:
        """The mean loss, and the seconds that the optimizer took."""
        total = torch.zeros((), device=device)
        for tokens, targets in data:
            loss = self.model(tokens, targets) / len(data)
            loss.backward()
            total += loss.detach()
        finish(device)
        began = time.perf_counter()
        self.optimizer.step()
        finish(device)
        taken = time.perf_counter() - began
        self.optimizer.zero_grad()
        return float(total), taken


class ResidentMasters:
    """fp32 copies of bf16 weights, updated and kept on the device."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self._pairs = [(item, nn.Parameter(item.detach().float())) for item in model.parameters()]
        self._inner = torch.optim.AdamW([master for _, master in self._pairs], lr=lr, fused=True)

    def step(self) -> None:
        for parameter, master in self._pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self._inner.step()
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)
                master.grad = None

    def zero_grad(self) -> None:
        for parameter, _ in self._pairs:
            parameter.grad = None


def bare_model(options: argparse.Namespace) -> GPT:
    sizes = {name: getattr(options, name) for name in ("vocabulary", "length", "width", "depth", "heads")}
    with torch.device("meta"):
        return GPT(**sizes, dropout=0.0)


def fill(model: nn.Module, device: torch.device) -> None:
    """The same weights in every way, whatever their precision and wherever they are."""
    torch.manual_seed(0)
    with torch.no_grad():
        for item in model.parameters():
            value = torch.empty(item.shape, device=device).normal_(0, 0.02) if item.dim() > 1 else None
            local = item.to_local() if hasattr(item, "to_local") else item
            local.zero_() if value is None else local.copy_(value)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)


def with_checkpoints(model: GPT) -> GPT:
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


def make_remat(options: argparse.Namespace, device: torch.device, in_backward: bool = False) -> Training:
    model = bare_model(options).to(torch.bfloat16).to_empty(device=device)
    fill(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)
    remat.offload_optimizer(
        optimizer, options.offload, master_weights=True, in_backward=in_backward, device_bytes=options.device_bytes
    )
    if options.budget:
        return Training(remat.optimize(model, options.budget, time_limit=options.time_limit), optimizer)
    return Training(with_checkpoints(model), optimizer)


def make_resident(options: argparse.Namespace, device: torch.device) -> Training:
    model = bare_model(options).to(torch.bfloat16).to_empty(device=device)
    fill(model, device)
    return Training(with_checkpoints(model), ResidentMasters(model, options.lr))


def make_fsdp(options: argparse.Namespace, device: torch.device) -> Training:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    policy = dict(
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        offload_policy=CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    )
    model = with_checkpoints(bare_model(options))
    for layer in model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    model.to_empty(device="cpu")
    fill(model, device)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=options.lr, fused=options.fused_cpu))


WAYS: dict[str, Callable[[argparse.Namespace, torch.device], Training]] = {
    "remat": make_remat,
    "remat-in-backward": functools.partial(make_remat, in_backward=True),
    "fsdp": make_fsdp,
    "resident": make_resident,
}


def run(way: str, options: argparse.Namespace) -> Row:
    device = torch.device(options.device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        cap = int(parse_budget(options.cap).amount)
        torch.cuda.set_per_process_memory_fraction(1.0 if way == "resident" else min(1.0, cap / total))
    began = time.perf_counter()
    training = WAYS[way](options, device)
    generator = torch.Generator().manual_seed(0)
    shape = (options.accumulate, options.batch, options.length + 1)
    text = torch.randint(options.vocabulary, shape, generator=generator).to(device)
    data = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in text]
    losses = [training.step(data, device)[0] for _ in range(options.warmup)]
    ready_s = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, optimizer_times = [], []
    for _ in range(options.steps):
        finish(device)
        began = time.perf_counter()
        loss, taken = training.step(data, device)
        finish(device)
        times.append(time.perf_counter() - began)
        optimizer_times.append(taken)
        losses.append(loss)
    step_s = statistics.median(times)
    return Row(
        way=way,
        parameters=sum(item.numel() for item in training.model.parameters()),
        tokens_per_s=options.accumulate * options.batch * options.length / step_s,
        step_ms=1000 * step_s,
        optimizer_ms=1000 * statistics.median(optimizer_times),
        peak_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        reserved_bytes=torch.cuda.max_memory_reserved() if device.type == "cuda" else 0,
        host_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        first_loss=losses[0],
        last_loss=losses[-1],
        ready_s=ready_s,
    )


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_apart(way: str, limit_s: float, *more: str) -> dict[str, Any]:
    """In a process of its own: what it found, or why it did not."""
    # Options given later count.
    command = [sys.executable, "-m", "benchmarks.bench_optimizer_offload", *sys.argv[1:], "--here", way, *more]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"way": way, "failure": f"not done within {limit_s:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"way": way, "failure": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return dict(json.loads(lines[-1]))


def tell(row: dict[str, Any]) -> None:
    if "failure" in row:
        print(f"| {row['way']} | {row['failure']} |", flush=True)
        return
    sizes = " | ".join(f"{row[name] / GIB:.2f}" for name in ("peak_bytes", "reserved_bytes", "host_bytes"))
    print(
        f"| {row['way']} | {row['parameters'] / 1e9:.2f} | {row['tokens_per_s']:.0f} | {row['step_ms']:.0f} | "
        f"{row['optimizer_ms']:.0f} | {sizes} | {row['first_loss']:.4f} → {row['last_loss']:.4f} | "
        f"{row['ready_s']:.0f} |",
        flush=True,
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cap", default="24GiB", help="of device memory, set in the allocator")
    parser.add_argument("--offload", default="cpu", help='"cpu" or "disk:/a/folder"')
    parser.add_argument("--device-bytes", default="1.5GiB", help="for state on its way")
    parser.add_argument("--budget", help="plan the step with remat.optimize instead of checkpoints per block")
    parser.add_argument("--time-limit", type=float, default=30, help="of that plan, in seconds")
    for name, value in dict(width=2560, depth=35, heads=20, vocabulary=50304, length=1024, batch=8).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--accumulate", type=int, default=1, help="batches of one update")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--no-fused-cpu", dest="fused_cpu", action="store_false", help="of the update on the CPU")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=100, help="of each way, getting ready included")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--here", choices=list(WAYS), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.here:
        print(json.dumps(asdict(run(options.here, options))))
        return
    print(
        "| way | billion parameters | tokens/s | step ms | optimizer ms | peak GiB | reserved | host | loss | ready s |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---|---:|")
    rows = []
    for way in options.ways:
        rows.append(run_apart(way, options.limit_s))
        tell(rows[-1])
        if way == "fsdp" and "failure" in rows[-1] and options.fused_cpu:
            # Not every version of torch has that kernel for sharded tensors.
            rows.append(run_apart(way, options.limit_s, "--no-fused-cpu"))
            tell(rows[-1])
    is_cuda = options.device == "cuda"
    device = torch.cuda.get_device_name() if is_cuda else ""
    named = ("cap", "width", "depth", "vocabulary", "length", "batch", "accumulate", "device_bytes", "offload")
    facts = {name: getattr(options, name) for name in named}
    save_results(options.output, {**facts, "device": device or "cpu", "rows": rows}, device)


if __name__ == "__main__":
    main()
