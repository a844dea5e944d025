"""One graph that was traced, in the variants in which the step uses it.

A variant is the graph for one set of outputs that receive no gradient. The first guess is what users mostly do: where
a scalar comes out, it is the loss, and nothing else receives a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from remat.core.graph import ValueId
from remat.core.problem import Costs, Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.pytorch.costs.op_costs import Progress, profile
from remat.pytorch.costs.plain_peak import PlainStep
from remat.pytorch.device import storage_bytes
from remat.pytorch.graph.capture import Captured, capture, updated_and_read
from remat.pytorch.graph.specialize import drop_tangents
from remat.pytorch.run.compose import Passed, Source
from remat.pytorch.run.execute import Saved
from remat.pytorch.run.gradients.hand_over import with_hand_over
from remat.pytorch.run.lower import Lowered, lower

VariantKey = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The traced graph's number, the outputs without gradient, and the sizes where it leaves some open: the same in every
run of the same step."""


@dataclass(slots=True)
class Variant:
    """A captured graph with what is known about it."""

    key: VariantKey
    captured: Captured
    full: Captured
    """The same for all outputs."""
    absent: frozenset[int]
    plain: PlainStep
    is_whole_step: bool
    """Nothing that matters can happen outside: the graph is the whole forward and only scalars receive gradients."""
    is_stale: bool = False
    """Whether what is known of its ops is no longer true."""
    _costs: Costs | None = None
    _frugal: Lowered | None = None
    model: Variant | None = None
    """The same graph at other sizes, whose programs run here too."""
    lowerings: dict[Schedule, Lowered] = field(default_factory=dict)
    """What was lowered already, for sizes that share it."""
    shape_words: tuple[str, ...] = ()
    """Of the inputs, where nodes stand for other sizes."""

    def costs(
        self,
        progress: Progress | None = None,
        agreed: Callable[[Callable[[], Costs]], Costs] = lambda find: find(),
    ) -> Costs:
        """Measured here, or wherever ranks that train together have `agreed` to."""
        if self._costs is None:
            self._costs = agreed(lambda: profile(self.captured, progress, again=self.is_stale))
        return self._costs

    def forget_costs(self) -> None:
        """They are measured again when they are next asked for."""
        self._costs, self._frugal, self.is_stale = None, None, True

    @property
    def is_measured(self) -> bool:
        return self._costs is not None

    def frugal(self) -> Lowered:
        """The schedule with the smallest peak known, for a call whose surroundings are not known yet."""
        from remat.solvers.schedule.overwrite import always_overwritten
        from remat.solvers.search.floor import squeeze

        if self.model is not None:
            return self.model.frugal()
        if self._frugal is None:
            problem = Problem(self.captured.graph, self.costs(), budget_bytes=0)
            self._frugal = lower(self.captured, squeeze(always_overwritten(problem)).schedule())
        return self._frugal

    def is_forward(self, value: ValueId) -> bool:
        return self.captured.graph.producers()[value] < self.captured.boundary

    def dropped_at_once(self, sources: Iterable[Source]) -> tuple[Passed, ...]:
        """Outputs that the caller does not hold until backward, where this is the step's only call."""
        sizes = self.captured.size_bytes
        return tuple(Passed(sizes[value], born=0, held=0, source=(call, value)) for call, value in sources)

    def keep_all(self) -> Lowered:
        """Nothing computed twice."""
        schedule = plain_schedule(self.captured.graph)
        if schedule not in self.lowerings:
            self.lowerings[schedule] = lower(self.captured, schedule)
        return self.lowerings[schedule]

    def shapes(self) -> list[str]:
        """Of the inputs, as `float32[16, 1024]`."""
        return list(self.shape_words) or [described(node.meta.get("val")) for node in self.captured.inputs()]

    def copied_bytes(self) -> int:
        """What a forward copies so that it could run again (see `execute.Rerun`)."""
        if not self.absent:
            return 0
        inputs = self.captured.inputs()
        copied = (inputs[place].meta["val"] for place in updated_and_read(self.full))
        return sum(storage_bytes(value, self.captured.device) for value in copied)

    def held_bytes(self) -> int:
        """What plain eager keeps for this graph between forward and backward."""
        return self.plain.held_bytes - self.plain.resident_bytes

    def incoming_bytes(self) -> int:
        """Gradients that backward takes."""
        tangents = self.captured.graph.ops[self.captured.boundary].outputs
        return sum(self.captured.size_bytes[value] for value in tangents)

    def plain_peak_bytes(self, dropped_bytes: int = 0) -> int:
        """What plain eager needs for this graph beyond what is resident, where so much of its outputs is dropped."""
        # Most of what eager calls is an op of the graph, too: measured there, it is known here.
        self.costs()
        return self.plain.peak_bytes(dropped_bytes) - self.plain.resident_bytes


@dataclass(slots=True)
class TracedGraph:
    """A joint graph and its variants by the outputs that receive no gradient."""

    number: int
    joint: GraphModule
    num_forward_outputs: int
    plain: PlainStep
    alone: bool
    """The step's forward is this graph and nothing else."""
    breaks_off: bool
    """It ends at something Dynamo cannot trace: a scalar that it hands there is no loss."""
    handed: frozenset[int] = frozenset()
    """Inputs whose gradients are used up as soon as they are there."""
    full: Captured = field(init=False)
    absent: frozenset[int] = field(init=False)
    """What the next step is expected to leave without gradient."""
    was_surprised: bool = False
    _variants: dict[frozenset[int], Variant] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.full = capture(self.joint, self.num_forward_outputs)
        if self.handed:
            self.full = self._captured(self.joint)
        scalars: set[int] = set()
        others: set[int] = set()
        for number, node in enumerate(self.full.tangents()):
            (scalars if node.meta["val"].numel() == 1 else others).add(number)
        self.absent = frozenset(others if scalars and not self.breaks_off else ())

    def settle(self, inputs: Sequence[Any]) -> float:
        """A call with these inputs starts; by how much larger they may be under the same plan: not at all."""
        return 1.0

    def variant(self) -> Variant:
        """The graph as the next step is expected to use it."""
        if self.absent not in self._variants:
            captured = self.full
            if self.absent:
                captured = self._captured(drop_tangents(self.joint, self.absent))
            present = [node for number, node in enumerate(captured.tangents()) if number not in self.absent]
            whole = self.alone and all(node.meta["val"].numel() == 1 for node in present)
            key = (self.number, tuple(sorted(self.absent)), ())
            self._variants[self.absent] = Variant(key, captured, self.full, self.absent, self.plain, whole)
        return self._variants[self.absent]

    def as_traced(self) -> Variant:
        """To run without a plan."""
        return self.variant()

    def _captured(self, joint: GraphModule) -> Captured:
        if self.handed:
            joint = with_hand_over(joint, self.num_forward_outputs, self.handed)
        return capture(joint, self.num_forward_outputs)

    def declared_plain_bytes(self) -> int:
        """What plain eager needs at the largest shape that was declared, beyond what is resident: none was."""
        return 0

    def measure_again(self) -> None:
        """Ops no longer take what they took."""
        for variant in self._variants.values():
            variant.forget_costs()

    def return_all(self) -> None:
        """Gradients that were to be used up are not: they leave together when backward is over."""
        self.handed = frozenset()
        self._variants.clear()
        self.full = capture(self.joint, self.num_forward_outputs)

    def saw(self, absent: frozenset[int]) -> None:
        """A step left `absent` without gradient. After a wrong guess only what was never there is left out."""
        if not self.absent <= absent:
            self.was_surprised = True
        self.absent = self.absent & absent if self.was_surprised else absent


@dataclass(slots=True)
class Ran:
    """One forward call of the step under way."""

    variant: Variant
    schedule: Schedule | None = None
    saved: weakref.ref[Saved] | None = None
    is_in_backward: bool = False
    went_back: bool = False
    passed_gradients: tuple[tuple[int, int, ValueId], ...] = ()
    """See `Call`."""
    growth: float = 1.0
    """How many times as large its inputs may be under the same plan."""

    @property
    def is_open(self) -> bool:
        """Whether its backward may still come."""
        return self.saved is not None and self.saved() is not None


def described(value: Any) -> str:
    """`float32[16, 1024]` for a tensor."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]}{list(value.shape)}"
    words = repr(value)
    # Process groups and the like, which DTensors bring along: where they are in memory is nobody's concern.
    return type(value).__name__ if " at 0x" in words else words
