"""Models as engines train them on several ranks, and what is compared of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
SIZES = {
    "gpt": ("gpt", dict(batch=16, length=64, vocabulary=64, width=96, depth=6, heads=4, dropout=0.1)),
    "resnet": ("resnet18", dict(batch=16, side=64, classes=10, width=16, shrink=1)),
}
HOWS = ("ddp inside", "ddp outside", "fsdp keep inside", "fsdp keep outside", "fsdp free inside", "fsdp free outside")
BLOCKS = ("Block", "Residual")
UNSHOWN = ("peaks", "plain_peaks", "predicted", "budget_bytes")
"""Of a row, what is kept and not printed."""


def sharded(model: Any, root: Any, *, frees: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (world_size(),))
    for module in model.modules():
        if type(module).__name__ in BLOCKS:
            fully_shard(module, mesh=mesh, reshard_after_forward=frees)
    return fully_shard(root, mesh=mesh, reshard_after_forward=frees)


def world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size()


def built(how: str, model: Any, share: str | None, **options: Any) -> Any:
    """A model trained in one of the ways of `HOWS`, under a budget or plainly; `options` are of `remat.optimize`."""
    from torch.nn.parallel import DistributedDataParallel

    import remat

    engine, order = how.rsplit(" ", 1)
    within = model if share is None or order == "outside" else remat.optimize(model, share, **options)
    if engine in ("ddp", "zero1"):
        whole = DistributedDataParallel(within, bucket_cap_mb=0.5)
    else:
        whole = sharded(model, within, frees=engine.endswith("free"))
    return remat.optimize(whole, share, **options) if share is not None and order == "outside" else whole


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
