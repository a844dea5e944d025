"""The ways to train that are compared: what PyTorch users pick today, and Remat at given budgets.

In: names and settings. Out: a `Way`, and by `made_ready` the callable that trains a model that way. Each compiled peer
may be helped past what transformers does while it is traced: `Treatment` says how. The best peer is looked for among
all of them, so that no peer is beaten only because nobody helped it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import remat
from remat.core.budget import BudgetUnit, parse_budget
from remat.integrations.masks import masks_as_in_eager
from remat.pytorch._compat.dynamo import positions_looked_at
from remat.pytorch._compat.layer_drop import draws_compared
from remat.pytorch.explore.module_blocks import repeated_blocks

TORCH_BUDGETS = (0.8, 0.6, 0.4, 0.2, 0.0)


class Blocks(StrEnum):
    """What is done to every repeated block of the model."""

    AS_THEY_ARE = "as they are"
    CHECKPOINT = "checkpoint"
    MATMULS = "keep matmuls and attention"
    EVERY_SECOND = "keep every second matmul and attention"


class Treatment(StrEnum):
    """What is changed around the model before it is traced."""

    PLAIN = "plain"
    ONE_GRAPH = "one-graph"
    """Dynamo passes over logging calls and layers that could be left out at random, where it would break the graph."""
    EAGER_MASKS = "eager-masks"
    """One graph, and no mask is built that eager would leave to the attention kernel."""


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    label: str
    compiled: bool = False
    blocks: Blocks = Blocks.AS_THEY_ARE
    torch_budget: float | None = None
    """PyTorch's `activation_memory_budget`."""
    budget: str | None = None
    """Remat's, as `remat.optimize` takes it; None for a peer."""
    search_s: float | None = None
    treatment: Treatment = Treatment.PLAIN
    offload: str | None = None
    """Where values may spend a while, as `remat.optimize` takes it."""
    time_limit_s: float | None = None
    """Of planning."""
    saves_on_host: bool = False
    """Everything that backward reads goes to the host, by torch's `save_on_cpu`."""

    @property
    def is_ours(self) -> bool:
        return self.budget is not None

    @property
    def budget_bytes(self) -> int | None:
        """Where the budget is no share of something that is not known yet."""
        asked = None if self.budget is None else parse_budget(self.budget)
        return int(asked.amount) if asked is not None and asked.unit is BudgetUnit.BYTES else None

    def treated(self, treatment: Treatment) -> Way:
        if treatment is Treatment.PLAIN:
            return self
        words = treatment.value.replace("-", " ")
        return replace(self, name=f"{self.name}+{treatment}", label=f"{self.label}, {words}", treatment=treatment)

    @property
    def untreated_name(self) -> str:
        return self.name.split("+")[0]


def way_from(fields: dict[str, Any]) -> Way:
    """A way from its fields, as they travel between processes."""
    return Way(**{**fields, "blocks": Blocks(fields["blocks"]), "treatment": Treatment(fields["treatment"])})


def peers(treatments: Sequence[Treatment]) -> list[Way]:
    """Every peer; the compiled ones under each treatment."""
    eager = [
        Way("eager", "eager"),
        Way("eager-block", "eager, checkpoint per block", blocks=Blocks.CHECKPOINT),
    ]
    compiled = [
        Way("compile", "compile", True),
        Way("compile-block", "compile, checkpoint per block", True, Blocks.CHECKPOINT),
        Way("compile-selective", "compile, selective: all matmuls", True, Blocks.MATMULS),
        Way("compile-half", "compile, selective: every second matmul", True, Blocks.EVERY_SECOND),
        *(
            Way(f"compile-budget-{share}", f"compile, activation_memory_budget {share}", True, torch_budget=share)
            for share in TORCH_BUDGETS
        ),
    ]
    return eager + [way.treated(treatment) for treatment in treatments for way in compiled]


def ours(budgets: Iterable[str], *, compiled: bool = True, search_s: float | None = None) -> list[Way]:
    """Remat at each budget: a number of GiB, or anything `remat.optimize` takes."""
    kernels = "" if compiled else "-eager"
    words = "Remat" if compiled else "Remat, eager kernels"
    return [
        Way(f"ours{kernels}-{text}", f"{words}, {_spelled(text)}", compiled, budget=_spelled(text), search_s=search_s)
        for text in budgets
    ]


def selected(ways: Iterable[Way], only: Sequence[str], skip: Sequence[str]) -> list[Way]:
    """Those whose names match a pattern of `only`, where there is one, and none of `skip`."""

    def matches(way: Way, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(way.name, pattern) for pattern in patterns)

    return [way for way in ways if (not only or matches(way, only)) and not matches(way, skip)]


def made_ready(way: Way, model: nn.Module) -> Callable[..., Any]:
    """What is called in place of the model. The process is this way's own: torch's settings are changed for good."""
    prepare_blocks(model, way.blocks)
    if way.budget is not None:
        return optimized(way, model)
    if not way.compiled:
        return model
    if way.torch_budget is not None:
        torch._functorch.config.activation_memory_budget = way.torch_budget
    return torch.compile(model)


def optimized(way: Way, model: nn.Module) -> Callable[..., Any]:
    """The model under Remat: the one place that knows how it is asked for."""
    assert way.budget is not None
    options: dict[str, Any] = {}
    if way.compiled:
        options["compiler"] = "inductor"
    if way.search_s is not None:
        options["search"] = way.search_s
    if way.offload is not None:
        options["offload"] = way.offload
    if way.time_limit_s is not None:
        options["time_limit"] = way.time_limit_s
    made: Callable[..., Any] = remat.optimize(model, budget=way.budget, progress=False, **options)
    return made


@contextlib.contextmanager
def treatment_of(way: Way, model: nn.Module) -> Iterator[None]:
    """Around all calls of the model."""
    if way.treatment is Treatment.PLAIN:
        yield
        return
    methods = ("debug", "info", "warning", "warning_once", "warning_advice", "error")
    # transformers adds methods of its own to every logger.
    torch._dynamo.config.ignore_logging_functions.update(
        getattr(logging.Logger, name) for name in methods if hasattr(logging.Logger, name)
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(draws_compared())
        if way.treatment is Treatment.EAGER_MASKS:
            stack.enter_context(masks_as_in_eager())
            stack.enter_context(positions_looked_at())
        yield


def prepare_blocks(model: nn.Module, blocks: Blocks) -> None:
    """Have the model's repeated blocks checkpointed, or save their matmuls alone."""
    if blocks is Blocks.AS_THEY_ARE:
        return
    names = repeated_blocks(model)
    if not names:
        raise ValueError(f"{type(model).__name__} has no repeated blocks to checkpoint.")
    options: dict[str, Any] = {}
    if blocks is not Blocks.CHECKPOINT:
        options["context_fn"] = partial(_selective_contexts, blocks is Blocks.EVERY_SECOND)
    for name in names:
        block = model.get_submodule(name)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def _selective_contexts(every_second: bool) -> Any:
    kept, seen = _kept_ops(), {"forward": 0, "recompute": 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in kept:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if every_second and op in _MATMULS:
            mode = "recompute" if context.is_recompute else "forward"
            seen[mode] += 1
            if seen[mode] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


_MATMULS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.convolution.default,
    }
)
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


def _kept_ops() -> frozenset[Any]:
    found = (getattr(torch.ops.aten, name) for name in _ATTENTION if hasattr(torch.ops.aten, name))
    return _MATMULS | {packet.default for packet in found}


def _spelled(budget: str) -> str:
    """A bare number is one of GiB."""
    try:
        float(budget)
    except ValueError:
        return budget
    return f"{budget} GiB"
