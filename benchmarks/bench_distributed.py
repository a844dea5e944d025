"""Many devices: bits, peaks and plans of steps that several ranks train together.

    python -m benchmarks.bench_distributed sweep [--worlds 2,4] [--models gpt,resnet] [--steps 10]
    python -m benchmarks.bench_distributed agree [--runs 20]
    python -m benchmarks.bench_distributed growth [--worlds 8,64,256,1024]
    python -m benchmarks.bench_distributed pretend
    python -m benchmarks.bench_distributed failures
    python -m benchmarks.bench_distributed device      on one CUDA device, as rank 0 of 8

`sweep` trains plainly and under budgets with DDP, FSDP2 and ZeRO-1 over gloo: losses of every step and parameters at
the end must have equal bits, no step may need more than its budget, and the prediction is compared with what is
measured. `agree` starts ranks with cold caches of their own and compares their plans. `growth` simulates the meeting of
many ranks by threads over one TCP store. `pretend` compares one process that pretends to be rank 0 with real ranks.
`failures` kills and stops ranks. `device` trains 1.3 billion parameters as rank 0 of 8 pretended ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.many_ranks import run_ranks
from benchmarks.runs import save_results

RESULTS = Path(__file__).parent / "results"
SIZES = {
    "gpt": ("gpt", dict(batch=16, length=64, vocabulary=64, width=96, depth=6, heads=4, dropout=0.1)),
    "resnet": ("resnet18", dict(batch=16, side=64, classes=10, width=16, shrink=1)),
}
HOWS = ("ddp inside", "ddp outside", "fsdp keep inside", "fsdp keep outside", "fsdp free inside", "fsdp free outside")
BLOCKS = ("Block", "Residual")


def sharded(model: Any, root: Any, *, frees: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (_world(),))
    for module in model.modules():
        if type(module).__name__ in BLOCKS:
            fully_shard(module, mesh=mesh, reshard_after_forward=frees)
    return fully_shard(root, mesh=mesh, reshard_after_forward=frees)


def _world() -> int:
    import torch.distributed as dist

    return dist.get_world_size()


def built(how: str, model: Any, share: str | None) -> Any:
    """A model trained in one of the ways of `HOWS`, under a budget or plainly."""
    from torch.nn.parallel import DistributedDataParallel

    import remat

    engine, order = how.rsplit(" ", 1)
    within = model if share is None or order == "outside" else remat.optimize(model, share)
    if engine in ("ddp", "zero1"):
        whole = DistributedDataParallel(within, bucket_cap_mb=0.5)
    else:
        whole = sharded(model, within, frees=engine.endswith("free"))
    return remat.optimize(whole, share) if share is not None and order == "outside" else whole


def optimizer_for(how: str, model: Any) -> Any:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if how.startswith("zero1"):
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def digest(model: Any) -> str:
    """Of all that this rank holds of the parameters and buffers."""
    import torch

    found = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def plan_digest(plan: Any) -> str:
    """Of what runs, and of what it may need; each rank holds a part of its own size."""
    return hashlib.sha256(repr((plan.schedule, plan.budget_bytes, plan.fingerprint)).encode()).hexdigest()[:12]


def trained(rank: int, how: str, name: str, share: str | None, steps: int) -> dict[str, Any]:
    import torch

    import remat
    from remat import zoo

    torch.manual_seed(0)
    family, sizes = SIZES[name]
    example = zoo.build(family, **sizes)
    model = built(how, example.model, share)
    optimizer = optimizer_for(how, model)

    def batch(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(example.args[0]), generator=generator)
        return [item[order] for item in example.args]

    losses, began = [], time.perf_counter()
    torch.manual_seed(rank)
    for number in range(steps):
        loss = model(*batch(100 * number + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = time.perf_counter() - began
    data = batch(rank)
    kept = [optimizer]

    def step() -> None:
        model(*data).backward()
        kept[0].zero_grad()

    bits, peaks = digest(model), [remat.measure(step).peak_bytes for _ in range(3)]
    found = {"losses": losses, "bits": bits, "peaks": peaks, "seconds": seconds}
    if share is not None:
        plan = remat.plan_of(model)
        found |= {"budget": plan.budget_bytes, "predicted": plan.predicted_peak, "plain": plan.plain_peak_bytes}
        found |= {"plan": plan_digest(plan), "overhead": plan.overhead}
        found |= {"breakdown": dict(plan.breakdown_bytes)}
    return found


def trained_all(rank: int, how: str, name: str, shares: list[str], steps: int) -> dict[str, Any]:
    """Plainly and under each budget, in one process."""
    warnings.simplefilter("ignore")
    plain = trained(rank, how, name, None, steps)
    return {"plain": plain, **{share: trained(rank, how, name, share, steps) for share in shares}}


def judged(how: str, name: str, world: int, share: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    plain, ours = [item["plain"] for item in ranks], [item[share] for item in ranks]
    off = [abs(item["predicted"] / max(item["peaks"]) - 1) for item in ours]
    return {
        "how": how,
        "model": name,
        "world": world,
        "budget": share,
        "bits_equal": all(
            (a["losses"], a["bits"]) == (b["losses"], b["bits"]) for a, b in zip(plain, ours, strict=True)
        ),
        "within_budget": all(max(item["peaks"]) <= item["budget"] for item in ours),
        "one_plan": len({item["plan"] for item in ours}) == 1,
        "largest_error_percent": round(100 * max(off), 2),
        "peaks": [item["peaks"] for item in ours],
        "plain_peaks": [item["peaks"] for item in plain],
        "predicted": [item["predicted"] for item in ours],
        "budget_bytes": [item["budget"] for item in ours],
        "overhead_percent": round(100 * ours[0]["overhead"], 2),
    }


def sweep(options: argparse.Namespace) -> None:
    path = RESULTS / "distributed_sweep.json"
    for world in map(int, options.worlds.split(",")):
        for name in options.models.split(","):
            for how in options.hows.split(","):
                shares = options.budgets.split(",")
                found = run_ranks(trained_all, how, name, shares, options.steps, world=world)
                if all(isinstance(item, dict) for item in found):
                    rows = [judged(how, name, world, share, found) for share in shares]
                else:
                    asked = {"how": how, "model": name, "world": world}
                    rows = [{**asked, "budget": share, "failed": str(found)[:500]} for share in shares]
                for row in rows:
                    print(*(row[key] for key in row if key not in UNSHOWN), flush=True)
                    keep(path, row)


UNSHOWN = ("peaks", "plain_peaks", "predicted", "budget_bytes")


def keep(path: Path, row: dict[str, Any]) -> None:
    """Put a row in the place of the one for the same case, if there is one."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def case(item: dict[str, Any]) -> tuple[Any, ...]:
        return item["world"], item["model"], item["how"], item["budget"]

    save_results(path, sorted([*(item for item in rows if case(item) != case(row)), row], key=case))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    found = modes.add_parser("sweep")
    found.add_argument("--worlds", default="2,4")
    found.add_argument("--models", default="gpt,resnet")
    found.add_argument("--budgets", default="0.8x,0.6x")
    found.add_argument("--hows", default=",".join((*HOWS, "zero1 inside")))
    found.add_argument("--steps", type=int, default=10)
    found.set_defaults(run=sweep)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
