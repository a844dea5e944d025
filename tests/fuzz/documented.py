"""Where torch's tracing gives other bits than eager, as `explanation/correctness.md` lists: a case in, the reasons out.

Only the order in which numbers are added or rounded differs there. Such a case is compared with a tolerance, and each
reason is found by looking at eager, not at what Remat did.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from tests.fuzz.modules import Backward, Case
from tests.fuzz.trainer import Trainer, differences
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BREAKS = ("not planned, runs as before", "runs unplanned")
BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
RECURRENT = ("recurrent layer", "recurrent cell")


def documented(case: Case, device: str, told: Iterable[str]) -> str:
    """Why the bits of this case may differ; empty where they have to be the same."""
    if any(part in text.lower() for text in told for part in BREAKS):
        return "gradients that cross a break of the graph are added in another order"
    if case.backward is Backward.TWO_CALLS:
        return "gradients of a parameter that each of two calls uses twice are added in another order"
    is_recurrent = any(name in RECURRENT for name, _ in case.blocks)
    if is_recurrent and (device == "cpu" or _is_traced_otherwise(case, device)):
        return "recurrent layers change slices in place, which tracing computes as a whole"
    if BEFORE_2_13 and _calls(case, device, torch.ops.aten.cumprod.default):
        return "tracing takes another formula for the gradient of cumprod"
    if case.backward is Backward.TWO_LOSSES and _is_traced_otherwise(case, device):
        return "each of two backwards adds zeros where only the other has gradients, maybe in another memory order"
    if _arrives_otherwise(case, device):
        return "a gradient arrives in another memory order than its output has"
    return ""


class _Seen(TorchDispatchMode):
    """Notes which ops run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.add(func)
        return func(*args, **(kwargs or {}))


def _calls(case: Case, device: str, op: Any) -> bool:
    trainer = Trainer(case, device)
    with _seed_kept(device), _Seen() as seen:
        trainer.seed()
        trainer.step(0)
    return op in seen.ops


def _is_traced_otherwise(case: Case, device: str) -> bool:
    """Whether what torch traces by itself, and runs with eager's kernels, has other bits."""
    plain, traced = Trainer(case, device), Trainer(case, device)
    traced.optimize(lambda step: torch.compile(step, backend="aot_eager", dynamic=False))
    records = []
    for trainer in (plain, traced):
        with _seed_kept(device):
            trainer.seed()
            records.append(trainer.step(0))
    return bool(differences(*records))


def _seed_kept(device: str) -> AbstractContextManager[None]:
    return torch.random.fork_rng(devices=[0] if device == "cuda" else [])


def _arrives_otherwise(case: Case, device: str) -> bool:
    trainer, found = Trainer(case, device), list[bool]()

    def look(_: Any, __: Any, outputs: Any) -> None:
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.dim():
                stride = leaf.stride()
                leaf.register_hook(lambda grad, stride=stride: found.append(grad.stride() != stride))

    trainer.module.register_forward_hook(look)
    with _seed_kept(device):
        trainer.seed()
        trainer.step(0)
    return any(found)
