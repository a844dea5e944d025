"""Where torch's tracing gives other bits than eager, as `explanation/correctness.md` lists: a case in, the reasons out.

Only the order in which numbers are added or rounded differs there. Such a case is compared with a tolerance, and each
reason is found by looking at eager, not at what Remat did.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tests.fuzz.modules import Backward, Case
from tests.fuzz.trainer import Trainer
from torch.utils._pytree import tree_leaves

BREAKS = ("not planned, runs as before", "runs unplanned")
RECURRENT = ("recurrent layer", "recurrent cell")


def documented(case: Case, device: str, told: Iterable[str]) -> str:
    """Why the bits of this case may differ; empty where they have to be the same."""
    if any(part in text.lower() for text in told for part in BREAKS):
        return "gradients that cross a break of the graph are added in another order"
    if case.backward is Backward.TWO_CALLS:
        return "gradients of a parameter that each of two calls uses twice are added in another order"
    if device == "cpu" and any(name in RECURRENT for name, _ in case.blocks):
        return "recurrent layers change slices in place, which tracing computes as a whole"
    if _arrives_otherwise(case, device):
        return "a gradient arrives in another memory order than its output has"
    return ""


def _arrives_otherwise(case: Case, device: str) -> bool:
    trainer, found = Trainer(case, device), list[bool]()

    def look(_: Any, __: Any, outputs: Any) -> None:
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.dim():
                stride = leaf.stride()
                leaf.register_hook(lambda grad, stride=stride: found.append(grad.stride() != stride))

    trainer.module.register_forward_hook(look)
    with torch.random.fork_rng(devices=[0] if device == "cuda" else []):
        trainer.seed()
        trainer.step(0)
    return any(found)
