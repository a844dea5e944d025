"""Sharing by tags, the classic way: storage is handed on from values that are dead to those that come.

In: a problem and a schedule. Out: a `Sharing`, a tag for each buffer; a tag is memory as large as its largest buffer.
Ops are visited in order. Every version has a counter of the reads to come. An output takes over the tag of an input
whose counter says that this is its last read, where the op may work in place; else it takes a free tag, the smallest
that is large enough, or the largest of those too small, which grows; else a new one. A counter at zero frees its tag.
This is what MXNet's planner does (Chen et al., 2016). It is fast and not always the smallest: see `sharing_exact`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.errors import InvalidLayout
from remat.layout.liveness import version_id, workspace_id
from remat.layout.storages import Storages, storages_of


@dataclass(frozen=True, slots=True)
class Sharing:
    """Buffers of one tag lie in the same memory, one after the other."""

    storages: Storages
    tags: tuple[int, ...]
    """For each buffer, from 0."""
    bound_bytes: int
    """Proven: no sharing by tags takes less."""

    @property
    def tag_bytes(self) -> tuple[int, ...]:
        """The size of each tag: that of its largest buffer."""
        sizes: Counter[int] = Counter()
        for tag, buffer in zip(self.tags, self.storages.buffers, strict=True):
            sizes[tag] = max(sizes[tag], buffer.size)
        return tuple(sizes[tag] for tag in range(len(sizes)))

    @property
    def total_bytes(self) -> int:
        return sum(self.tag_bytes)

    @property
    def in_place(self) -> tuple[tuple[int, int], ...]:
        """The pairs that were made one."""
        return tuple((dying, born) for dying, born in self.storages.in_place if self.tags[dying] == self.tags[born])


def check_sharing(sharing: Sharing) -> None:
    """Raise `InvalidLayout` where two buffers of one tag are alive together and neither is written into the other."""
    buffers, allowed = sharing.storages.buffers, set(sharing.storages.in_place)
    for one, first in enumerate(buffers):
        for other in range(one + 1, len(buffers)):
            second = buffers[other]
            is_allowed = (one, other) in allowed or (other, one) in allowed
            if sharing.tags[one] == sharing.tags[other] and first.meets(second) and not is_allowed:
                raise InvalidLayout(f"Buffers {first.id} and {second.id} share a tag and are alive together.")


def load_in_place(storages: Storages) -> int:
    """The most alive at one time when every pair that may be one is: no sharing takes less."""
    changes: Counter[int] = Counter()
    for buffer in storages.buffers:
        changes[buffer.lower] += buffer.size
        changes[buffer.upper] -= buffer.size
    for born in {born for _, born in storages.in_place}:
        buffer = storages.buffers[born]
        # In its first step it lies where one that dies there lies.
        changes[buffer.lower] -= buffer.size
        changes[buffer.lower + 1] += buffer.size
    most = current = 0
    for time in sorted(changes):
        current += changes[time]
        most = max(most, current)
    return most


def share_by_tags(problem: Problem, schedule: Schedule, *, in_place: bool = True) -> Sharing:
    """The classic result; without `in_place` memory is only handed on from the dead."""
    found = storages_of(problem, schedule)
    storages = found if in_place else Storages(found.buffers, ())
    reads = _reads(problem, schedule)
    planner = _Planner(storages)
    versions: dict[int, str] = {}
    for step, number in enumerate(schedule.steps):
        op = problem.graph.ops[number]
        read = [versions[value] for value in op.inputs]
        made = [version_id(step, value) for value in op.outputs]
        for name in made:
            planner.allocate(name, [other for other in read if reads[other] == 1])
        planner.allocate(workspace_id(step), [])
        planner.release(workspace_id(step))
        for name in read:
            reads[name] -= 1
        for name in (*read, *made):
            if reads[name] == 0:
                planner.release(name)
        versions.update(zip(op.outputs, made, strict=True))
    return Sharing(storages, tuple(planner.tag_of[buffer.id] for buffer in storages.buffers), load_in_place(storages))


def _reads(problem: Problem, schedule: Schedule) -> Counter[str]:
    """How often each version is read; once more where it is an output, which is never freed."""
    ops = problem.graph.ops
    versions: dict[int, str] = {}
    reads: Counter[str] = Counter()
    for step, number in enumerate(schedule.steps):
        reads.update(versions[value] for value in ops[number].inputs)
        versions.update({value: version_id(step, value) for value in ops[number].outputs})
    reads.update(versions[value] for value in problem.graph.outputs)
    return reads


@dataclass(slots=True)
class _Planner:
    """Tags in use and tags that are free; buffers that are not there, being empty, are passed over."""

    storages: Storages
    tag_of: dict[str, int] = field(default_factory=dict)
    size_of: list[int] = field(default_factory=list)
    free: set[int] = field(default_factory=set)
    _sizes: dict[str, int] = field(init=False)
    _pairs: set[tuple[str, str]] = field(init=False)
    _held: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        buffers = self.storages.buffers
        self._sizes = {buffer.id: buffer.size for buffer in buffers}
        self._pairs = {(buffers[dying].id, buffers[born].id) for dying, born in self.storages.in_place}

    def allocate(self, name: str, dying: list[str]) -> None:
        """Give `name` a tag: that of one of `dying` where it may be written over, a free one, or a new one."""
        if name not in self._sizes:
            return
        over = next((other for other in dying if (other, name) in self._pairs and other in self._held), None)
        if over is not None:
            self._held.remove(over)
            tag = self.tag_of[over]
        else:
            tag = self._take(self._sizes[name])
        self.tag_of[name] = tag
        self._held.add(name)

    def release(self, name: str) -> None:
        """Its tag is free; not where it was written over, because another one has it now."""
        if name in self._held:
            self._held.remove(name)
            self.free.add(self.tag_of[name])

    def _take(self, size: int) -> int:
        if not self.free:
            self.size_of.append(size)
            return len(self.size_of) - 1
        tag = min(self.free, key=lambda tag: (self.size_of[tag] < size, abs(self.size_of[tag] - size), tag))
        self.free.remove(tag)
        self.size_of[tag] = max(self.size_of[tag], size)
        return tag
