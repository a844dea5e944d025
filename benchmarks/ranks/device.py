"""1.3 billion parameters as rank 0 of 8 on one CUDA device: predicted against what the allocator tells."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.ranks.models import RESULTS
from benchmarks.runs import save_results

STEPS = 6
SCALES = {"full": (2048, 24, 16, 50304), "small": (128, 6, 4, 512)}
"""Width, depth, heads and vocabulary."""


def add_to(modes: Any) -> None:
    found = modes.add_parser("device")
    found.add_argument("--budgets", default="plain,0.8x,0.6x")
    found.add_argument("--batch", type=int, default=8)
    found.add_argument("--length", type=int, default=1024)
    found.add_argument("--device", default="cuda")
    found.add_argument("--scale", choices=tuple(SCALES), default="full")
    found.set_defaults(run=device)


def device(options: argparse.Namespace) -> None:
    import torch

    rows = []
    for frees in (True, False):
        for share in options.budgets.split(","):
            rows.append(trained(options, share, frees=frees))
            print(rows[-1], flush=True)
            if options.device == "cuda":
                torch.cuda.empty_cache()
    if options.scale == "full":
        name = torch.cuda.get_device_name() if options.device == "cuda" else ""
        save_results(RESULTS / "distributed_device.json", rows, name)


def trained(options: argparse.Namespace, share: str, *, frees: bool) -> dict[str, Any]:
    """Peaks of some steps, plainly or under a budget, and what was predicted."""
    import torch

    import remat
    from remat.distributed.pretended import pretended

    with pretended(8):
        torch.manual_seed(0)
        model, batch = built(options, frees=frees)
        count = sum(item.numel() for item in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        planned = remat.optimize(model, share) if share != "plain" else model
        peaks = [peak_of(planned, batch, optimizer, options.device) for _ in range(STEPS)]
        row: dict[str, Any] = {"parameters": count, "reshard": frees, "budget": share, "peaks": peaks}
        if share == "plain":
            return row
        plan = remat.plan_of(planned)
        row |= {"predicted": plan.predicted_peak, "budget_bytes": plan.budget_bytes}
        row |= {"plain": plan.plain_peak_bytes, "overhead": plan.overhead}
        row |= {"breakdown": dict(plan.breakdown_bytes)}
        row["error_percent"] = round(100 * (plan.predicted_peak / max(peaks[-2:]) - 1), 2)
        row["asked_bytes"] = asked_bytes(options.device)
        row["breakdown_measured"] = measured(planned, batch, optimizer).breakdown
    return row


def built(options: argparse.Namespace, *, frees: bool) -> tuple[Any, tuple[Any, Any]]:
    """A GPT that FSDP2 spreads over the ranks, block by block in bf16, and a batch."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from remat.distributed.pretended import blocks_of
    from remat.zoo.gpt import GPT

    width, depth, heads, vocabulary = SCALES[options.scale]
    mesh = init_device_mesh(options.device, (8,))
    with torch.device(options.device):
        model = GPT(vocabulary=vocabulary, length=options.length, width=width, depth=depth, heads=heads, dropout=0.0)
        tokens = torch.randint(vocabulary, (options.batch, options.length + 1))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*blocks_of(model), model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=frees)
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def asked_bytes(device: str) -> int:
    """The most that was asked of the allocator in the last step: what it handed out beyond that is its own rounding."""
    import torch

    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"]) if device == "cuda" else 0


def measured(model: Any, batch: Any, optimizer: Any) -> Any:
    """What a step needs, by kind: it tells of which there is more than was foreseen."""
    import remat

    def step() -> None:
        model(*batch).backward()
        optimizer.zero_grad()

    return remat.measure(step)


def peak_of(model: Any, batch: Any, optimizer: Any, device: str) -> int:
    """Of forward and backward; the optimizer's own temporaries are not in a plan.

    Remat's own watchers start the allocator's peak anew: what it was until then is kept for whoever has asked for it
    in this way, and lost for `torch.cuda.max_memory_allocated`.
    """
    import torch

    from remat.pytorch.cuda_peak import CudaPeak

    def step() -> None:
        model(*batch).backward()

    if device == "cuda":
        torch.cuda.synchronize()
        peak = CudaPeak.of(step, torch.device(device))
    else:
        peak = measured(model, batch, optimizer).peak_bytes
        step()
    optimizer.step()
    optimizer.zero_grad()
    return peak
