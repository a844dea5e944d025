"""One graph that Dynamo captured, and what runs for it.

It is compiled when it is first called, under what its host decides; what cannot be planned runs as torch.compile would
run it, and what torch.compile cannot compile runs in eager.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node

from remat.errors import RematError
from remat.inductor.choose import Choice
from remat.inductor.compile import Built, build, build_plainly
from remat.inductor.joint import Joint
from remat.inductor.loss_rewrite import LossRegion, Rewritten, chunks_for, rewrite_loss
from remat.inductor.partition import Cut, Uncut
from remat.inductor.predict import Rates
from remat.inductor.rates import measure_rates
from remat.inductor.timeline import CannotFollow, Timeline
from remat.inductor.workspaces import Workspaces
from remat.pytorch.plain import PlainStep
from remat.pytorch.progress import Reporter

CHUNK_SHARE = 1 / 16
"""Of what a step may need: the most that one chunk of logits takes."""

Decide = Callable[[Uncut, Rates], Choice]
Version = tuple[GraphModule, tuple[Rewritten, ...], Joint | None, Rates | None, frozenset[int]]
"""A graph with its loss as it was or in chunks; see `CompiledGraph.version`."""


class Host(Protocol):
    """Who knows all graphs of a step."""

    reporter: Reporter

    def enter(self, graph: CompiledGraph, inputs: Sequence[Any]) -> None:
        """The graph is about to run: have it compiled."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Peaks of a compiled graph."""

    steady_bytes: int
    first_bytes: int
    """Of the first step, in which Inductor also times kernels: never less."""

    def fit(self, allowed: int) -> bool:
        return self.first_bytes <= allowed


@dataclass(slots=True)
class CompiledGraph:
    """One graph that Dynamo captured, and what runs for it."""

    host: Host
    number: int
    module: GraphModule
    plain: PlainStep
    device: torch.device
    alone: bool
    original: GraphModule = field(init=False)
    """The module as it was captured."""
    chunked: tuple[Rewritten, ...] = ()
    """Losses that are computed in chunks."""
    joint: Joint | None = None
    rates: Rates | None = None
    saved_by_torch: frozenset[int] = frozenset()
    """What torch.compile would save by itself."""
    built: Built | None = None
    choice: Choice | None = None
    timeline: Timeline | None = None

    is_planned: bool = False
    """Whether the choice in use was made for the budget, rather than to get by until all graphs are known."""
    unplanned: Callable[..., Any] | None = None
    """What runs where nothing could be planned."""

    def __post_init__(self) -> None:
        self.original = self.module

    def __call__(self, *inputs: Any) -> Any:
        if self.unplanned is None:
            self._prepare(inputs)
        if self.unplanned is not None:
            return self.unplanned(*inputs)
        assert self.built is not None, "a graph is compiled before it is called"
        return self.built.call(*inputs)

    def _prepare(self, inputs: Sequence[Any]) -> None:
        """Get ready to run; what cannot be planned runs as torch.compile would run it, or else in eager."""
        try:
            self.host.enter(self, inputs)
        except RematError:
            raise
        except Exception as error:  # torch raises many kinds while compiling; none of them may stop training
            self.unplanned = _unplanned(self.module, inputs, error)

    @property
    def is_whole_step(self) -> bool:
        """Whether nothing that matters should happen outside: the graph is the whole forward and returns a loss.

        It may return more, such as logits. Where a step goes on with these, all is planned anew.
        """
        outputs: Any = self.module.graph.output_node().args[0]
        values = [node.meta.get("example_value") for node in outputs if isinstance(node, Node)]
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
        return self.alone and (not tensors or any(value.numel() == 1 for value in tensors))

    def compile(self, inputs: Sequence[Any], decide: Decide) -> None:
        """Compile under what `decide` says of the joint graph."""

        def ask(uncut: Uncut) -> Cut | None:
            if self.joint is None or self.rates is None:
                self.joint = uncut.joint
                with self.host.reporter.profiling() as progress:
                    self.rates = measure_rates(uncut.joint, uncut.nodes, self.device, progress)
            self.choice = decide(uncut, self.rates)
            return None if self.choice.is_default else Cut(self.choice.saved, self.choice.unrolled)

        self.timeline = None
        self.built = build(self.module, inputs, ask, self.device)

    def version(self) -> Version:
        """The graph as it is now, with what is known of it."""
        return self.module, self.chunked, self.joint, self.rates, self.saved_by_torch

    def restore(self, version: Version) -> None:
        """Be the graph that it was."""
        self.module, self.chunked, self.joint, self.rates, self.saved_by_torch = version

    def use_chunks(self, budget_bytes: int) -> bool:
        """Compute the loss in chunks where that can be done; what was known of the graph is then void."""

        def count(region: LossRegion) -> int:
            wanted = chunks_for(region)
            return max(wanted, chunks_for(region, int(CHUNK_SHARE * budget_bytes))) if wanted else 0

        module = copy.deepcopy(self.module)
        found = tuple(item for item in rewrite_loss(module, count) if isinstance(item, Rewritten))
        if found:
            self.module, self.chunked, self.joint, self.rates = module, found, None, None
        return bool(found)

    def switch_loss(self, budget_bytes: int) -> bool:
        """Compute the loss in chunks, or where it is, as a whole again; whether there is one to be switched."""
        if not self.chunked:
            return self.use_chunks(budget_bytes)
        self.module, self.chunked, self.joint, self.rates = self.original, (), None, None
        return True

    def needs(self, workspaces: Workspaces) -> Needs:
        """What the compiled graph needs beyond what is there when it begins."""
        assert self.built is not None and self.choice is not None
        try:
            self.timeline = self.built.timeline(self.device, workspaces)
        except CannotFollow as error:
            warnings.warn(f"The compiled step's peak is only estimated: {error}", stacklevel=2)
            return Needs(self.choice.prediction.peak_bytes, self.choice.prediction.peak_bytes)
        slack = self.timeline.slack_bytes if self.device.type == "cuda" else 0
        return Needs(self.timeline.peak_bytes + slack, self.timeline.first_peak_bytes + slack)


def _unplanned(module: GraphModule, inputs: Sequence[Any], error: Exception) -> Callable[..., Any]:
    """As torch.compile would, or in eager where it cannot; says what and why."""
    reason = str(error).strip().split("\n")[0]
    what = f"A graph of {len(module.graph.nodes)} nodes is not planned ({type(error).__name__}: {reason})"
    try:
        call = build_plainly(module, inputs)
    except Exception:
        warnings.warn(f"{what}, and torch.compile cannot compile it; it runs in eager.", stacklevel=4)
        return module.forward
    warnings.warn(f"{what}; it runs as torch.compile runs it.", stacklevel=4)
    return call
