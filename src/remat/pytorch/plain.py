"""The peak of the step in plain eager PyTorch, found without running it: what "1x" means.

In: the graph Dynamo captured, which is the user's forward as eager would run it (in-place ops and all). It runs on
fake tensors, forward and backward, while every storage is followed from birth to death; no memory is used.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from remat.pytorch._compat import DispatchMode, FakeTensorMode, tree_leaves
from remat.pytorch.capture import storage_bytes
from remat.pytorch.profile import call_key, without_layout


@dataclass(frozen=True, slots=True)
class PlainStep:
    """Bytes of a plain eager step, inputs and parameters included."""

    live_bytes: tuple[tuple[str, int], ...]
    """For each op in order, what it is (see `call_key`) and what was in memory just after it ran."""
    resident_bytes: int
    held_bytes: int
    """In memory between forward and backward."""

    def peak_bytes(self, workspace: Mapping[str, int]) -> int:
        """The peak, given what kernels need for themselves while they run.

        Eager may call with other strides or literals than what was measured: then shapes and dtypes tell.
        """
        alike: dict[str, int] = {}
        for key, need in workspace.items():
            alike[without_layout(key)] = max(need, alike.get(without_layout(key), 0))
        return max(
            (live + workspace.get(key, alike.get(without_layout(key), 0)) for key, live in self.live_bytes),
            default=self.resident_bytes,
        )


class StorageWatch(DispatchMode):
    """Follows storages on one device from birth to death; `current` is in bytes, `live` op by op."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.current = 0
        self.live: list[tuple[str, int]] = []
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = int(storage._cdata)
        if address in self._live:
            return
        size = storage_bytes(tensor, self.device)
        self._live[address] = (size, weakref.ref(storage, lambda _: self._forget(address)))
        self.current += size

    def _forget(self, address: int) -> None:
        self.current -= self._live.pop(address)[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        self.live.append((call_key(func, args, kwargs or {}), self.current))
        return result


def plain_step(module: GraphModule, inputs: Sequence[Any], device: torch.device) -> PlainStep:
    """Run `module` forward and backward on fake copies of `inputs` and watch."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.enable_grad():
        fakes = _fake_inputs(inputs)
        watch = StorageWatch(device)
        for fake in fakes:
            if isinstance(fake, torch.Tensor):
                watch.see(fake)
        resident = watch.current
        with watch:
            outputs = module(*fakes)
            # Autocast's region ends before backward, and with it the casts that it keeps.
            torch.clear_autocast_cache()
            held = watch.current
            roots = loss_like([leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)])
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    return PlainStep(tuple(watch.live), resident, held)


def loss_like(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a user would call backward on: the scalars if there are any, otherwise everything differentiable."""
    differentiable = [output for output in outputs if output.requires_grad]
    scalars = [output for output in differentiable if output.numel() == 1]
    return scalars or differentiable


def _fake_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Tensors of the same shapes; those that shared a storage share one again."""
    storages: dict[int, torch.UntypedStorage] = {}
    return [_fake_like(item, storages) if isinstance(item, torch.Tensor) else item for item in inputs]


def _fake_like(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    with torch.no_grad():
        address = int(tensor.untyped_storage()._cdata)
        if address not in storages:
            size = tensor.untyped_storage().nbytes()
            flat = torch.empty(size, dtype=torch.uint8, device=tensor.device)
            storages[address] = flat.untyped_storage()
        fake = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        fake.set_(storages[address], tensor.storage_offset(), tensor.shape, tensor.stride())
    return fake.requires_grad_(tensor.requires_grad)
