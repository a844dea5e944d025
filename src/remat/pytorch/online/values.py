"""Contents of storages, and how each was made: enough to have one again after its memory was given up.

A `Value` is what a storage holds between two writes. A `Made` is the op that computed it, with its arguments, in which
tensors are replaced by `Use`s of values, and the generator's state where it drew random numbers. Values that no op of
ours made, such as parameters and batches, are constants: they are kept as long as a `Made` uses them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from remat.pytorch._compat.fakes import ASK_GRAD_MODE, call_in_grad_mode
from remat.pytorch._compat.tensors import storage_uses
from remat.pytorch.rng import RngState


class Group:
    """Values without memory that would be computed again together, and the time that takes: a disjoint set."""

    __slots__ = ("cost_ns", "parent")

    def __init__(self, cost_ns: float) -> None:
        self.cost_ns, self.parent = cost_ns, self

    def root(self) -> Group:
        group = self
        while group.parent is not group:
            group.parent = group.parent.parent
            group = group.parent
        return group


class Value:
    """What a storage holds, from one write to the next."""

    __slots__ = (
        *("__weakref__", "group", "handles", "holders", "kept", "locks", "made", "number", "place"),
        *("reads", "readers", "size_bytes", "used_ns", "users"),
    )

    def __init__(self, storage: torch.UntypedStorage, number: int, size_bytes: int) -> None:
        self.place: weakref.ref[torch.UntypedStorage] | None = weakref.ref(storage)
        """Where it is or was; None where that has been overwritten."""
        self.number, self.size_bytes = number, size_bytes
        """Its number in the trace, and the bytes that count; -1 and 0 for what was there before."""
        self.reads: tuple[int, ...] = (number,) if number >= 0 else ()
        """Numbers of all values that must be in memory for this one to be read."""
        self.kept: torch.UntypedStorage | None = None
        self.made: Made | None = None
        self.handles = self.users = self.locks = 0
        self.holders: list[weakref.ref[Handle]] = []
        self.used_ns = 0.0
        self.readers: list[weakref.ref[Made]] = []
        self.group: Group | None = None

    def storage(self) -> torch.UntypedStorage | None:
        """Where it can be read; None where it has to be computed again."""
        if self.kept is not None:
            return self.kept
        return self.place() if self.place is not None else None

    def hold(self, storage: torch.UntypedStorage) -> None:
        """It is there, and stays."""
        self.place, self.kept = weakref.ref(storage), storage

    def release(self) -> None:
        """Nobody of ours needs it any more, unless as a constant."""
        if not self.locks and not self.handles and not (self.users and self.made is None):
            self.kept = None


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Geometry:
        return Geometry(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def is_apart_from(self, other: Geometry) -> bool:
        """Whether they are known to share no element: columns of one matrix, say."""
        if self.dtype != other.dtype:
            return False
        if self._end() <= other.offset or other._end() <= self.offset:
            return True
        if self.stride != other.stride or len(self.shape) != len(other.shape):
            return False
        mine, theirs = self._box(), other._box()
        if mine is None or theirs is None:
            return False
        return any(end <= start or stop <= begin for (begin, end), (start, stop) in zip(mine, theirs, strict=True))

    def _end(self) -> int:
        if 0 in self.shape:
            return self.offset
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def _box(self) -> list[tuple[int, int]] | None:
        """Where it begins and ends along each stride, the largest first; None where a stride is no multiple of the
        next, or it goes on beyond the next larger one.
        """
        order = sorted(range(len(self.stride)), key=lambda place: -self.stride[place])
        left, box, above = self.offset, [], 0
        for place in order:
            step = self.stride[place]
            if step <= 0 or (above and above % step):
                return None
            begin, left = divmod(left, step)
            if above and (begin + self.shape[place]) * step > above:
                return None
            box.append((begin, begin + self.shape[place]))
            above = step
        return box if not left else None

    def tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


class Handle:
    """What autograd holds in place of a tensor that it saved; `on_end` is told the value when it lets go."""

    __slots__ = ("__weakref__", "_on_end", "geometry", "value")

    def __init__(self, value: Value, tensor: torch.Tensor, on_end: Callable[[Value], None]) -> None:
        self.value, self.geometry, self._on_end = value, Geometry.of(tensor), on_end
        self._take(value)

    def __del__(self) -> None:
        self.value.handles -= 1
        self._on_end(self.value)

    def _take(self, value: Value) -> None:
        self.value = value
        value.handles += 1
        value.holders.append(weakref.ref(self))

    def move(self, value: Value) -> None:
        """Its part of the storage is the same in another value."""
        self.value.handles -= 1
        self._take(value)


def held_parts(value: Value, written: Geometry) -> tuple[list[Handle], list[Handle]]:
    """Handles of a value that a write touches, and those that it leaves as they are."""
    handles = [handle for reference in value.holders if (handle := reference()) is not None and handle.value is value]
    apart = [handle for handle in handles if handle.geometry.is_apart_from(written)]
    return [handle for handle in handles if handle not in apart], apart


class Use:
    """A tensor among an op's arguments: a value, and how the tensor lies in it."""

    __slots__ = ("geometry", "value")

    def __init__(self, value: Value, tensor: torch.Tensor) -> None:
        self.value, self.geometry = value, Geometry.of(tensor)
        value.users += 1
        if value.made is None:
            value.kept = tensor.untyped_storage()

    def __del__(self) -> None:
        self.value.users -= 1
        self.value.release()

    def size_bytes(self) -> int:
        storage = self.value.storage()
        return 0 if storage is None else storage.nbytes()

    def is_free(self) -> bool:
        """Whether nobody else reads the value: what writes into it can have its memory."""
        value = self.value
        is_only = value.made is not None and not value.handles and value.users == 1
        return is_only and value.kept is not None and storage_uses(value.kept) == 1

    def tensor(self) -> torch.Tensor:
        storage = self.value.storage()
        assert storage is not None, "inputs are computed before an op runs again"
        return self.geometry.tensor(storage)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Made:
    """An op that ran, and can run again."""

    func: Any
    args: Any
    kwargs: Any
    written: frozenset[int]
    """Which of the tensors among its arguments it writes to, in their order."""
    time_ns: float
    need_bytes: int
    rng: RngState | None
    inputs: tuple[Value, ...] = ()
    results: list[tuple[int, weakref.ref[Value]]] = field(default_factory=list)
    """Values by the place of a tensor among its results."""
    updates: list[tuple[int, weakref.ref[Value]]] = field(default_factory=list)
    """Values by the place of a tensor among its arguments, into which it wrote them."""

    def outputs(self) -> Iterator[Value]:
        return (value for _, reference in (*self.results, *self.updates) if (value := reference()) is not None)

    def copied_bytes(self) -> int:
        """What is copied before the op writes into it."""
        uses = list(uses_within((self.args, self.kwargs)))
        return sum(uses[place].size_bytes() for place in self.written if not uses[place].is_free())

    def run(self) -> None:
        """Compute all outputs once more, into memory of their own; inputs must be there."""
        uses = list(uses_within((self.args, self.kwargs)))
        free = [place for place in self.written if uses[place].is_free()]
        tensors = [use.tensor() for use in uses]
        for place in self.written:
            if place in free:
                uses[place].value.kept = uses[place].value.place = None
            else:
                tensors[place] = _copied(tensors[place])
        given = iter(tensors)
        args, kwargs = filled((self.args, self.kwargs), given)
        run = partial(call_in_grad_mode, self.func) if self.func in ASK_GRAD_MODE else self.func
        result = self.rng.replay(run, *args, **kwargs) if self.rng else run(*args, **kwargs)
        found = list(_tensors(result))
        pairs = [(found[place], reference) for place, reference in self.results]
        pairs += [(tensors[place], reference) for place, reference in self.updates]
        for tensor, reference in pairs:
            value = reference()
            if value is not None and value.storage() is None:
                value.hold(tensor.untyped_storage())


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """The same in a copy of the whole storage."""
    return Geometry.of(tensor).tensor(tensor.untyped_storage().clone())


def described(value: Any, use: Callable[[torch.Tensor], Use]) -> Any:
    """Arguments of an op with every tensor replaced by a `Use`."""
    if isinstance(value, torch.Tensor):
        return use(value)
    if isinstance(value, (list, tuple)):
        return type(value)([described(item, use) for item in value])
    if isinstance(value, dict):
        return {key: described(item, use) for key, item in value.items()}
    return value


def filled(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The other way round; tensors in the order of `uses_within`."""
    if isinstance(value, Use):
        return next(tensors)
    if isinstance(value, (list, tuple)):
        return type(value)([filled(item, tensors) for item in value])
    if isinstance(value, dict):
        return {key: filled(item, tensors) for key, item in value.items()}
    return value


def uses_within(value: Any) -> Iterator[Use]:
    if isinstance(value, Use):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from uses_within(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from uses_within(item)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
