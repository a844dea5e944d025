"""What `fully_shard` does to a step: weights are gathered for a while, gradients leave in shards.

In: a trace as one device runs it, and levers that shard weights. Out: a trace with what FSDP2 allocates written in as
ops of their own that take no time (`links` tells what collectives take). For each group, a repeated block or all the
rest: before its forward a flat buffer is filled by the all-gather and copied out to weights; the buffer goes when the
next group has its own. After forward the weights go (ZeRO-3) or stay (ZeRO-2). In backward they come again, and the
buffer of the group before is filled ahead of time. At the end of a group's backward its gradients are copied into one
buffer, which goes when the next group's is made, and the shard of their sum stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from remat.fit.levers import Levers, Zero
from remat.fit.step_trace import StepTrace, TracedCall

COLLECTIVE = "collective"
ROOT = ""
"""The group of what lies in no block."""


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """Parameters that are gathered and scattered together, in bytes as they are computed with."""

    name: str
    gathered_bytes: int
    trained_bytes: int
    """Of gradients, in one piece."""


def groups_of(trace: StepTrace) -> tuple[ShardGroup, ...]:
    """The rest of the model first, then its blocks in order."""
    sums = {name: [0, 0] for name in (ROOT, *trace.blocks)}
    for item in trace.parameters:
        both = sums[trace.block_of(item.name)]
        both[0] += item.size_bytes
        both[1] += item.size_bytes if item.is_trained else 0
    return tuple(ShardGroup(name, *both) for name, both in sums.items() if name == ROOT or both[0])


def sharded(trace: StepTrace, levers: Levers) -> StepTrace:
    """The trace of one rank of several among which weights and gradients are shared out."""
    return _Sharder(trace, levers).write()


class _Sharder:
    def __init__(self, trace: StepTrace, levers: Levers) -> None:
        self._trace, self._ranks = trace, levers.replicas
        self._keeps = levers.zero is Zero.GRADIENTS
        self._widened = 2 if levers.has_masters else 1
        """Gradients in bf16 are summed in fp32 where that is what is updated."""
        self._groups = {group.name: group for group in groups_of(trace)}
        self._sizes = list(trace.sizes)
        self._calls: list[TracedCall] = []
        self._flat: dict[str, int] = {}
        self._whole: dict[str, int] = {}
        self._held: list[int] = []
        """Buffers that go at the next event of their kind."""
        self._gradients: dict[int, str] = {}
        self._is_backward = False

    def write(self) -> StepTrace:
        forward, backward = self._spans(backward=False), self._spans(backward=True)
        middle, order = self._trace.first_backward, list(backward)
        entered, left = defaultdict[int, list[str]](list), defaultdict[int, list[str]](list)
        for name, (start, last) in (*forward.items(), *backward.items()):
            entered[start].append(name)
            left[last].append(name)
        self._gather(ROOT)
        for place, call in enumerate(self._trace.calls):
            if place == middle:
                self._end_forward()
                self._is_backward = True
                self._begin_backward(backward)
            for name in entered.get(place, ()):
                self._enter(name, order, backward=call.backward)
            self._calls.append(call)
            for name in left.get(place, ()):
                self._leave(name, backward=call.backward)
        self._release(ROOT)
        self._reduce(ROOT)
        self._drop(self._held)
        return replace(
            self._trace,
            calls=tuple(self._calls),
            sizes=tuple(self._sizes),
            gradients=self._gradients,
            children={},
        )

    def _spans(self, *, backward: bool) -> dict[str, tuple[int, int]]:
        """The first and last op of each block, in order of the first."""
        found: dict[str, tuple[int, int]] = {}
        for place, call in enumerate(self._trace.calls):
            block = self._trace.block_of(call.module)
            if block in self._groups and block != ROOT and call.backward == backward:
                found[block] = (found.get(block, (place, place))[0], place)
        return found

    def _enter(self, name: str, order: Sequence[str], *, backward: bool) -> None:
        if not backward:
            self._gather(name)
        elif not self._keeps:
            self._copy_out(name)
            # The next one to come is gathered while this one computes.
            following = order.index(name) + 1
            if following < len(order):
                self._fill(order[following])

    def _leave(self, name: str, *, backward: bool) -> None:
        if backward:
            self._release(name)
            self._reduce(name)
        elif not self._keeps:
            self._release(name)

    def _end_forward(self) -> None:
        self._drop(self._held)
        if not self._keeps:
            self._release(ROOT)

    def _begin_backward(self, backward: Iterable[str]) -> None:
        if self._keeps:
            return
        self._fill(ROOT)
        self._copy_out(ROOT)
        first = next(iter(backward), None)
        if first is not None:
            self._fill(first)

    def _gather(self, name: str) -> None:
        """In forward: the buffer of the group before goes when this one is there."""
        before = list(self._held)
        self._held.clear()
        self._fill(name)
        self._drop(before)
        flat = self._flat.pop(name)
        self._whole[name] = self._make(self._groups[name].gathered_bytes, [flat])
        self._held.append(flat)

    def _fill(self, name: str) -> None:
        if name not in self._flat:
            self._flat[name] = self._make(self._groups[name].gathered_bytes, [])

    def _copy_out(self, name: str) -> None:
        self._fill(name)
        self._whole[name] = self._make(self._groups[name].gathered_bytes, [self._flat.pop(name)])

    def _release(self, name: str) -> None:
        whole = self._whole.pop(name, None)
        if whole is not None:
            self._drop([whole])

    def _reduce(self, name: str) -> None:
        group = self._groups[name]
        if not group.trained_bytes:
            return
        self._drop(self._held)
        own = [value for value, owner in self._trace.gradients.items() if self._trace.block_of(owner) == name]
        size = self._widened * group.trained_bytes
        buffer = self._make(size, own)
        shard = self._make(-(-size // self._ranks), [buffer])
        self._gradients[shard] = name
        self._held.append(buffer)

    def _make(self, size_bytes: int, reads: Iterable[int]) -> int:
        self._sizes.append(size_bytes)
        self._event(tuple(reads), (len(self._sizes) - 1,))
        return len(self._sizes) - 1

    def _drop(self, values: list[int]) -> None:
        """They live until here."""
        if values:
            self._event(tuple(values), ())
        values.clear()

    def _event(self, reads: tuple[int, ...], makes: tuple[int, ...]) -> None:
        self._calls.append(TracedCall(COLLECTIVE, "", self._is_backward, 0.0, 0, reads, makes, False))
