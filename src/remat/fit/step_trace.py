"""A training step as it runs, op by op: what the state model and the search are asked about.

A `StepTrace` is plain data: the ops of forward and backward in order, the storages they read and make, which of these
end as whose gradient, and the model's parameters. `problem` makes it what solvers take. Nothing here needs torch;
`tracing.py` makes traces, and `depth.py` makes one of a deep model from that of a shallow one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from remat.core.graph import Graph, Op, ValueId
from remat.core.problem import Costs, Problem


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One op; values are numbered by `StepTrace.sizes`."""

    target: str
    module: str
    backward: bool
    time_ns: float
    workspace_bytes: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    recomputable: bool
    holds: tuple[int, ...] = ()
    """Values that eager PyTorch lets go of only after this op, whoever read them last."""


@dataclass(frozen=True, slots=True)
class TracedParameter:
    name: str
    count: int
    """Of its numbers."""
    item_bytes: int
    is_trained: bool
    rows: int = 1
    """Along the first dimension, which shards are cut along."""

    @property
    def size_bytes(self) -> int:
        return self.count * self.item_bytes


@dataclass(frozen=True, slots=True)
class StepTrace:
    """Forward and backward of one micro-batch on one device, without an optimizer."""

    calls: tuple[TracedCall, ...]
    sizes: tuple[int, ...]
    gradients: dict[int, str]
    """Values that end as the gradient of a parameter, by its name."""
    outputs: tuple[int, ...]
    """Values that outlive backward besides: the loss."""
    parameters: tuple[TracedParameter, ...]
    buffer_bytes: int
    input_bytes: int
    held_bytes: int = 0
    """What the device's matrix library takes once and keeps."""
    grain_bytes: int = 1
    """The device hands out multiples of this."""
    blocks: tuple[str, ...] = ()
    """The repeated blocks of the model, as `layers.3`."""
    children: dict[str, str] = field(default_factory=dict)
    """Modules that are part of a block, by its name; found on the way."""

    def rounded(self, size_bytes: int) -> int:
        """What the device hands out for a tensor."""
        return -(-size_bytes // self.grain_bytes) * self.grain_bytes

    @property
    def time_ns(self) -> float:
        return sum(call.time_ns for call in self.calls)

    @property
    def first_backward(self) -> int:
        return next((place for place, call in enumerate(self.calls) if call.backward), len(self.calls))

    def block_of(self, module: str) -> str:
        """The block that a module, or a parameter by its name, lies in; empty where it lies in none."""
        if module not in self.children:
            pieces = module.split(".")
            names = (".".join(pieces[:length]) for length in range(1, len(pieces) + 1))
            self.children[module] = next((name for name in names if name in self.blocks), "")
        return self.children[module]

    def problem(self, resident_bytes: int = 0, dying: Collection[int] = (), *, eager: bool = False) -> Problem:
        """For the solvers; values in `dying` are no outputs, whatever becomes of them.

        With `eager`, values live as long as they did when the step was traced: the plain schedule is the step as it is.
        """
        ops = tuple(
            Op(
                name=f"{place}_{call.target}",
                inputs=tuple(map(ValueId, dict.fromkeys((*call.reads, *call.holds)) if eager else call.reads)),
                outputs=tuple(map(ValueId, call.makes)),
                backward=call.backward,
                recomputable=call.recomputable,
                target=call.target,
                module=call.module,
            )
            for place, call in enumerate(self.calls)
        )
        kept = dict.fromkeys(value for value in (*self.gradients, *self.outputs) if value not in dying)
        graph = Graph(ops, len(self.sizes), tuple(map(ValueId, kept)), "fit")
        times = tuple(call.time_ns for call in self.calls)
        workspaces = tuple(call.workspace_bytes for call in self.calls)
        return Problem(graph, Costs(times, workspaces, self.sizes), 0, resident_bytes + self.held_bytes)


class TraceBuilder:
    """Puts ops and storages together as they are met."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._calls: list[TracedCall | None] = []
        self._makers: list[int] = []
        self._read: set[int] = set()

    @property
    def calls(self) -> tuple[TracedCall, ...]:
        return tuple(call for call in self._calls if call is not None)

    @property
    def place(self) -> int:
        """Of the op that was added last, for `hold`."""
        return len(self._calls) - 1

    def hold(self, value: int, place: int) -> None:
        """The value is there until after the op at `place`, or the one that it became part of."""
        while (call := self._calls[place]) is None:
            place += 1
        if place > self._makers[value]:
            self._calls[place] = replace(call, holds=(*call.holds, value))

    def add(self, call: TracedCall, new_sizes: Collection[int], written: Collection[int]) -> tuple[int, ...]:
        """Add an op that makes values of `new_sizes`; gives their numbers.

        A write in place becomes part of the op that made what it writes to, where nobody has read that. Elsewhere
        neither can run without the other, so neither runs twice.
        """
        made = tuple(range(len(self.sizes), len(self.sizes) + len(new_sizes)))
        self.sizes += new_sizes
        if written and not made and self._merge(call, written):
            return ()
        for value in written:
            maker = self._calls[self._makers[value]]
            if maker is not None:
                self._calls[self._makers[value]] = replace(maker, recomputable=False)
        self._makers += [len(self._calls)] * len(made)
        self._read.update(call.reads)
        self._calls.append(replace(call, makes=made, recomputable=call.recomputable and not written))
        return made

    def _merge(self, call: TracedCall, written: Collection[int]) -> bool:
        places = {self._makers[value] for value in written}
        place = min(places)
        before = self._calls[place]
        if len(places) > 1 or before is None or not before.recomputable or before.backward != call.backward:
            return False
        if not self._read.isdisjoint(before.makes):
            return False
        self._calls[place] = None
        for value in before.makes:
            self._makers[value] = len(self._calls)
        reads = dict.fromkeys(value for value in (*before.reads, *call.reads) if value not in before.makes)
        self._read.update(reads)
        self._calls.append(
            replace(
                before,
                time_ns=before.time_ns + call.time_ns,
                workspace_bytes=max(before.workspace_bytes, call.workspace_bytes),
                reads=tuple(reads),
            )
        )
        return True
