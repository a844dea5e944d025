"""The state of one optimizer, away from the device, and the steps that bring it there.

In: an optimizer's parameters with their gradients, and tickets of a `Store`. Out: updated parameters. A step goes
bucket by bucket. While one is updated by the optimizer's own code, the state of the next is fetched, and that of the
one before is written:

    fetch      b0  b1  b2  b3
    update         b0  b1  b2  b3
    write              b0  b1  b2  b3

Each bucket gets as much of `optimizer.param_groups` and `optimizer.state` as it needs, so that the optimizer sees a
smaller model. With master weights it sees fp32 tensors in the place of parameters. What is small stays in
`optimizer.state`, as does what the store refuses.
"""

from __future__ import annotations

import warnings
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from remat.errors import OffloadFailed
from remat.pytorch._compat.optimizers import bare_step
from remat.pytorch._compat.tensors import is_plain, version_of
from remat.pytorch.host.store import LastingStore, LastingTicket, Strided

State = dict[str, Any]
MASTER = "master_weight"
SMALL_BYTES = 2**16
"""Smaller tensors of state stay on the device: all of them together are next to nothing, and each would take a copy."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of one group that are updated together, and what of their state is on its way."""

    group: dict[str, Any]
    parameters: list[torch.Tensor]
    uses_up: bool = False
    """Whether gradients are dropped when they have been used."""
    fetched: dict[torch.Tensor, State] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of a loaded state, which torch must not move to the device."""

    tensor: torch.Tensor
    is_precise: bool
    """Whether it belongs to a master weight, if its parameter has one."""


class StateAway:
    """See the module's docstring."""

    AT_ONCE: ClassVar = 3
    """Buckets on the device: one comes, one is updated, one goes."""

    def __init__(self, optimizer: Optimizer, store: LastingStore, bucket_bytes: int, *, has_masters: bool) -> None:
        self._optimizer, self._store, self._bucket_bytes = optimizer, store, bucket_bytes
        self._has_masters = has_masters
        self._update = bare_step(type(optimizer))
        self._tickets: dict[torch.Tensor, dict[str, LastingTicket]] = defaultdict(dict)
        self._versions: dict[torch.Tensor, int] = {}
        """Of parameters with a master weight, when that was last in step with them."""
        self._moving: deque[Bucket] = deque()
        """The last is fetched, the others have been updated and are being written."""
        self._refused = False

    def send_all(self) -> None:
        """Send away what is there already."""
        for parameter in self._parameters():
            self._leave(parameter, self._optimizer.state.get(parameter, {}))
        self._wait(self._parameters())

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        try:
            for bucket in list(self._buckets()):
                self._push(bucket)
            for bucket in list(self._moving)[-1:]:
                self._run(bucket)
        finally:
            self._let_go()

    def push_early(self, place: int, parameters: list[torch.Tensor]) -> None:
        """Update these parameters of a group before the step; their gradients are used up by it."""
        try:
            self._push(Bucket(self._optimizer.param_groups[place], parameters, uses_up=True))
        except BaseException:
            self._let_go()
            raise

    def is_full(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether they are enough for a bucket."""
        return sum(map(self._weight, parameters)) >= self._bucket_bytes

    def is_waiting(self, parameter: torch.Tensor) -> bool:
        """Whether it is in a bucket that was not updated yet."""
        return any(parameter is item for bucket in list(self._moving)[-1:] for item in bucket.parameters)

    def _push(self, bucket: Bucket) -> None:
        """Begin to fetch a bucket; the one before is updated, and what the one before that holds is let go."""
        # Fetched before the other is updated: what is allocated for it then waits for earlier updates alone.
        self._fetch(bucket)
        self._moving.append(bucket)
        for previous in list(self._moving)[-2:-1]:
            self._run(previous)
        if len(self._moving) == self.AT_ONCE:
            self._wait(self._moving.popleft().parameters)

    def _let_go(self) -> None:
        """Of buckets that are left; of a step that failed, what has come must not stay."""
        left, self._moving = self._moving, deque()
        self._wait(parameter for bucket in left for parameter in bucket.parameters)

    def _buckets(self) -> Iterator[Bucket]:
        for group in self._optimizer.param_groups:
            bucket, size = Bucket(group, []), 0
            for parameter in group["params"]:
                if parameter.grad is None or self.is_waiting(parameter):
                    continue
                weight = self._weight(parameter)
                if bucket.parameters and size + weight > self._bucket_bytes:
                    yield bucket
                    bucket, size = Bucket(group, []), 0
                bucket.parameters.append(parameter)
                size += weight
            if bucket.parameters:
                yield bucket

    def _weight(self, parameter: torch.Tensor) -> int:
        """Bytes of its state on the device while it is updated; before the first update, as many as Adam makes."""
        known = sum(ticket.like.size_bytes for ticket in self._tickets[parameter].values())
        has_master = self._has_masters and _is_coarse(parameter)
        return known or (3 * 4 * parameter.numel() if has_master else 2 * parameter.nbytes)

    def _fetch(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters:
            tickets = self._tickets[parameter]
            bucket.fetched[parameter] = {key: self._store.copy_back(ticket) for key, ticket in tickets.items()}

    def _run(self, bucket: Bucket) -> None:
        """Update a bucket whose state is on its way, and send that away again."""
        for parameter in bucket.parameters:
            for ticket in self._tickets[parameter].values():
                ticket.wait_back()
        # Gradients may have been dropped since.
        updated = [parameter for parameter in bucket.parameters if parameter.grad is not None]
        pairs = [self._subject(parameter, bucket.fetched[parameter]) for parameter in updated]
        bucket.fetched.clear()
        with self._in_place(bucket.group, pairs) as found:
            self._update(self._optimizer)
        for parameter, (subject, _) in zip(updated, pairs, strict=True):
            if subject is not parameter:
                parameter.copy_(subject)
                self._versions[parameter] = version_of(parameter)
                found[subject][MASTER] = subject.detach()
            if subject in found:
                self._leave(parameter, found[subject])
            if bucket.uses_up:
                parameter.grad = None

    def _subject(self, parameter: torch.Tensor, fetched: State) -> tuple[torch.Tensor, State]:
        """What is updated, and its state: the parameter, or its master weight."""
        state = {**self._optimizer.state.get(parameter, {}), **fetched}
        if not self._has_masters or not _is_coarse(parameter):
            return parameter, state
        master = state.pop(MASTER, None)
        if master is None:
            master = parameter.detach().float()
        elif self._versions.get(parameter) != version_of(parameter):
            # Somebody else wrote to the parameter: what the master weight does not round to counts.
            master = torch.where(master.to(parameter.dtype) == parameter, master, parameter.float())
        assert parameter.grad is not None
        subject = torch.nn.Parameter(master)
        subject.grad = parameter.grad.float()
        return subject, state

    @contextmanager
    def _in_place(
        self, group: dict[str, Any], pairs: Iterable[tuple[torch.Tensor, State]]
    ) -> Iterator[dict[torch.Tensor, State]]:
        """The optimizer as one of these tensors and their states alone."""
        optimizer, state = self._optimizer, defaultdict[torch.Tensor, State](dict)
        groups, whole = optimizer.param_groups, optimizer.state
        state.update({subject: found for subject, found in pairs if found})
        optimizer.param_groups = [{**group, "params": [subject for subject, _ in pairs]}]
        optimizer.state = state
        try:
            yield state
        finally:
            optimizer.param_groups, optimizer.state = groups, whole

    def _leave(self, parameter: torch.Tensor, state: State) -> None:
        """Send what can go of a parameter's state, and keep the rest in the optimizer's."""
        kept = {key: value for key, value in state.items() if not self._send(parameter, key, value)}
        if kept or parameter in self._optimizer.state:
            self._optimizer.state[parameter] = kept

    def _send(self, parameter: torch.Tensor, key: str, value: Any) -> bool:
        """Whether the value is on its way."""
        ticket = self._tickets[parameter].pop(key, None)
        if self._refused or not _is_large(value):
            return False
        try:
            if ticket is None or ticket.like != Strided.of(value):
                ticket = self._store.copy_out(value)
            else:
                self._store.copy_over(ticket, value)
        except OffloadFailed as error:
            self._refused = True
            warnings.warn(f"What follows of the optimizer's state stays on the device: {error}", stacklevel=2)
            return False
        self._tickets[parameter][key] = ticket
        return True

    def _wait(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let go of the device's memory that copies hold, in the order of the compute stream."""
        for parameter in parameters:
            for ticket in self._tickets[parameter].values():
                ticket.wait_out()
                ticket.wait_back()

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    @contextmanager
    def shown(self) -> Iterator[None]:
        """`optimizer.state` with what is away, where it lies; who keeps a parameter's state keeps it whole."""
        state = self._optimizer.state
        kept = {parameter: state.get(parameter, {}) for parameter, tickets in self._tickets.items() if tickets}
        for parameter, found in kept.items():
            away = {key: self._store.peek(ticket) for key, ticket in self._tickets[parameter].items()}
            state[parameter] = {**found, **away}
        try:
            yield
        finally:
            state.update(kept)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While `optimizer.load_state_dict` runs: after all who change what is loaded, before all who read it."""
        before = self._optimizer.register_load_state_dict_pre_hook(self._hold)
        after = self._optimizer.register_load_state_dict_post_hook(self._take_loaded, prepend=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _hold(self, optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        """Before state is loaded: tensors that will go away must not come to the device first, nor be rounded."""
        return {**loaded, "state": {name: self._held(state) for name, state in loaded["state"].items()}}

    def _held(self, state: Any) -> Any:
        if not isinstance(state, dict):
            return state
        return {
            key: Held(value, self._has_masters) if self._is_held(key, value) else value for key, value in state.items()
        }

    def _is_held(self, key: str, value: Any) -> bool:
        return _is_large(value) or (self._has_masters and key != "step" and isinstance(value, torch.Tensor))

    def _take_loaded(self, optimizer: Optimizer) -> None:
        """After state was loaded: send away what was held."""
        self._let_go()
        for parameter in self._parameters():
            state = optimizer.state.get(parameter, {})
            tickets = self._tickets[parameter]
            for key in tickets.keys() - state.keys():
                del tickets[key]
            for ticket in tickets.values():
                # What is loaded may be the host's own memory, or be copied there by the host itself.
                self._store.peek(ticket)
            self._leave(parameter, {key: _cast(parameter, value) for key, value in state.items()})
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(state[key], Held):
                    optimizer.state[parameter][key] = value.to(parameter.device)
        self._wait(self._parameters())


def _is_large(value: Any) -> bool:
    """Whether it is a tensor that is worth a copy."""
    if not isinstance(value, torch.Tensor) or not is_plain(value) or value.layout is not torch.strided:
        return False
    return value.nbytes >= SMALL_BYTES


def _is_coarse(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() and parameter.dtype.itemsize < 4


def _cast(parameter: torch.Tensor, value: Any) -> Any:
    """As torch would, but where it is; the state of a master weight is as precise as that is."""
    if not isinstance(value, Held):
        return value
    found = value.tensor
    if not parameter.is_floating_point():
        return found
    return found.to(torch.float32) if value.is_precise and _is_coarse(parameter) else found.to(parameter.dtype)
