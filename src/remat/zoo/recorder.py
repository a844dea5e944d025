"""Write down a forward computation op by op and get its backward for nothing: op graphs without a framework.

In: calls such as `linear` and `dropout` on values, which are numbers. Out: a `Problem` of one training step with no
limit on memory. Backward is reverse-mode differentiation: an op reads the gradient that comes in and what the forward
op saved, gradients of a value with several readers are added, and gradients of weights are outputs. A time is the
larger of arithmetic and memory traffic on one accelerator (a roofline), plus the launch of a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from remat.core.graph import Graph, Op, ValueId
from remat.core.problem import LARGEST_BYTES, Costs, Problem

FLOPS_PER_NS = 200_000
BYTES_PER_NS = 2_000
LAUNCH_NS = 3_000


@dataclass
class Builder:
    """Collects ops one by one; `add` returns the values that the op produces."""

    ops: list[Op] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    workspaces: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(
        self,
        name: str,
        inputs: Sequence[int],
        sizes: Sequence[int],
        time: float,
        *,
        workspace: int = 0,
        backward: bool = False,
        recomputable: bool = True,
        module: str = "",
        target: str = "",
    ) -> list[int]:
        outputs = list(range(len(self.sizes), len(self.sizes) + len(sizes)))
        unique = tuple(ValueId(value) for value in dict.fromkeys(inputs))
        produced = tuple(ValueId(value) for value in outputs)
        self.ops.append(Op(name, unique, produced, backward, recomputable, target, module))
        self.times.append(time)
        self.workspaces.append(workspace)
        self.sizes += sizes
        return outputs

    def problem(self, outputs: Sequence[int], name: str = "", resident: int = 0) -> Problem:
        graph = Graph(tuple(self.ops), len(self.sizes), tuple(ValueId(value) for value in outputs), name)
        costs = Costs(tuple(self.times), tuple(self.workspaces), tuple(self.sizes))
        return Problem(graph, costs, LARGEST_BYTES, resident)


@dataclass(frozen=True, slots=True)
class _Read:
    """How one input of a forward op gets its gradient: from the incoming one and what was saved."""

    value: int
    saved: tuple[int, ...]
    flops: int
    passes: bool = False
    """The gradient goes through unchanged, as in an addition."""


@dataclass(frozen=True, slots=True)
class _Forward:
    name: str
    output: int
    reads: tuple[_Read, ...]
    weight_bytes: int
    weight_reads: tuple[int, ...]
    flops: int
    module: str


class Recorder:
    """One training step, written down as it would run."""

    def __init__(self) -> None:
        self.build = Builder()
        self.module = ""
        self._forward: list[_Forward] = []
        self._weights = 0

    def source(self, name: str, size: int) -> int:
        """A value that needs no gradient and no input, as a mask."""
        return self._run(name, (), (size,), 0)[0]

    def embed(self, name: str, size: int, weight_bytes: int) -> int:
        (output,) = self._run(name, (), (size,), 0)
        return self._remember(name, output, (), weight_bytes, (), size)

    def linear(self, name: str, x: int, size: int, weight_bytes: int, flops: int) -> int:
        """A product with a weight, or a convolution: backward needs its input for the weight's gradient alone."""
        (output,) = self._run(name, (x,), (size,), flops, weight_bytes)
        return self._remember(name, output, (_Read(x, (), flops),), weight_bytes, (x,), flops)

    def product(self, name: str, a: int, b: int, size: int, flops: int) -> int:
        """A product of two activations: the gradient of each needs the other."""
        (output,) = self._run(name, (a, b), (size,), flops)
        return self._remember(name, output, (_Read(a, (b,), flops), _Read(b, (a,), flops)))

    def pointwise(self, name: str, x: int, *others: int, saves: str = "input", size: int = -1) -> int:
        """A cheap op; its backward reads its "input", its "output" or "nothing". `others` get no gradient."""
        size = self.build.sizes[x] if size < 0 else size
        (output,) = self._run(name, (x, *others), (size,), 0)
        saved = {"input": (x,), "output": (output,), "nothing": ()}[saves]
        return self._remember(name, output, (_Read(x, saved, 0),))

    def bias(self, name: str, x: int, weight_bytes: int) -> int:
        (output,) = self._run(name, (x,), (self.build.sizes[x],), 0)
        return self._remember(name, output, (_Read(x, (), 0, passes=True),), weight_bytes)

    def norm(self, name: str, x: int, stats_bytes: int, weight_bytes: int) -> int:
        output, stats = self._run(name, (x,), (self.build.sizes[x], stats_bytes), 0)
        return self._remember(name, output, (_Read(x, (x, stats), 0),), weight_bytes, (x, stats))

    def dropout(self, name: str, x: int) -> int:
        """Keeps a mask of one byte for each element of two bytes."""
        size = self.build.sizes[x]
        output, mask = self._run(name, (x,), (size, max(1, size // 2)), 0)
        return self._remember(name, output, (_Read(x, (mask,), 0),))

    def sum(self, name: str, a: int, b: int) -> int:
        (output,) = self._run(name, (a, b), (self.build.sizes[a],), 0)
        return self._remember(name, output, tuple(_Read(value, (), 0, passes=True) for value in (a, b)))

    def concat(self, name: str, values: Sequence[int]) -> int:
        (output,) = self._run(name, values, (sum(self.build.sizes[value] for value in values),), 0)
        return self._remember(name, output, tuple(_Read(value, (), 0) for value in values))

    def finish(self, name: str, loss: int) -> Problem:
        """Differentiate `loss` and return the whole step; weights are resident."""
        (seed,) = self._run("ones", (), (self.build.sizes[loss],), 0, backward=True)
        gradients, outputs = {loss: seed}, [loss]
        for op in reversed(self._forward):
            incoming = gradients.pop(op.output, None)
            if incoming is None:
                continue
            self.module = op.module
            outputs += self._weight_gradient(op, incoming)
            for read in op.reads:
                self._accumulate(gradients, read, self._gradient(op, read, incoming))
        return self.build.problem(outputs, name, resident=self._weights)

    def _weight_gradient(self, op: _Forward, incoming: int) -> list[int]:
        if not op.weight_bytes:
            return []
        return self._run(f"{op.name}_weight", (incoming, *op.weight_reads), (op.weight_bytes,), op.flops, backward=True)

    def _gradient(self, op: _Forward, read: _Read, incoming: int) -> int:
        if read.passes:
            return incoming
        size = self.build.sizes[read.value]
        return self._run(f"{op.name}_backward", (incoming, *read.saved), (size,), read.flops, backward=True)[0]

    def _accumulate(self, gradients: dict[int, int], read: _Read, gradient: int) -> None:
        if read.value in gradients:
            both = (gradients[read.value], gradient)
            (gradient,) = self._run("add_gradients", both, (self.build.sizes[read.value],), 0, backward=True)
        gradients[read.value] = gradient

    def _remember(
        self,
        name: str,
        output: int,
        reads: tuple[_Read, ...],
        weight_bytes: int = 0,
        weight_reads: tuple[int, ...] = (),
        flops: int = 0,
    ) -> int:
        self._forward.append(_Forward(name, output, reads, weight_bytes, weight_reads, flops, self.module))
        self._weights += weight_bytes
        return output

    def _run(
        self,
        name: str,
        inputs: Sequence[int],
        sizes: Sequence[int],
        flops: int,
        extra_bytes: int = 0,
        *,
        backward: bool = False,
    ) -> list[int]:
        moved = sum(self.build.sizes[value] for value in inputs) + sum(sizes) + extra_bytes
        time = LAUNCH_NS + max(flops // FLOPS_PER_NS, moved // BYTES_PER_NS)
        return self.build.add(name, inputs, sizes, time, backward=backward, module=self.module)
