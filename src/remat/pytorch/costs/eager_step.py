"""The plain step of a model whose code takes another path under tracing, or that breaks into several graphs.

In: the module as the user calls it, with its arguments. A copy of it runs on fake tensors, forward and backward, in
plain Python and without Dynamo, while its storages are followed. Out: a `PlainStep`. Where the code looks at values it
gets them if they come from small arguments or from nothing (a random number that decides whether a layer is left out);
where a number or a truth depends on parameters or on much data, one is assumed and `assumes` says so: it may be on the
wrong side of a branch. What else cannot be followed raises `EagerUnknown`.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from remat.errors import RematError
from remat.integrations.masks import masks_by_value
from remat.pytorch._compat.dynamo import as_if_untraced
from remat.pytorch._compat.fakes import FakeTensor, fake_results_through, true_sizes_of_fused_layers
from remat.pytorch._compat.modes import DispatchMode, HigherOrderOperator, without_modes
from remat.pytorch._compat.tensors import hooks_of, schema_of
from remat.pytorch._compat.trees import tree_leaves, tree_map
from remat.pytorch.costs.fake_copies import FakeCopies
from remat.pytorch.costs.plain_peak import PlainStep, go_back, use_up
from remat.pytorch.costs.plain_watch import StorageWatch
from remat.pytorch.device import generator_indices
from remat.pytorch.graph.real_results import corrected
from remat.pytorch.reach import reachable_from

MOST_KNOWN = 1 << 14
"""Elements of tensors whose values are followed."""
_HARMLESS = ("torch.", "transformers.")
"""Libraries whose hooks keep nothing beyond the call."""
_LOOKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_ASSUMED: dict[torch.dtype, float | bool] = {
    torch.bool: False,
    **dict.fromkeys((torch.float64, torch.float32, torch.bfloat16, torch.float16), 1.0),
}
"""What a step that looks at its data most likely finds: nothing wrong, and numbers that are neither huge nor tiny."""


class EagerUnknown(RematError):
    """The step cannot be followed on fake tensors."""


def eager_step(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> PlainStep:
    """Run a fake copy of `model` forward and backward and watch."""
    _refuse_hooks(model)
    try:
        return _followed(model, args, kwargs, device)
    except Exception as error:  # the user's code may raise anything when it sees a fake tensor
        raise EagerUnknown(f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}") from error


def _followed(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> PlainStep:
    copies = FakeCopies(device.type, device)
    batch = (tuple(args), dict(kwargs))
    fakes = copies.of_arguments(batch)
    fake_model = copies.of_model(model)
    use_up(zip(model.parameters(), fake_model.parameters(), strict=True))
    known = _KnownValues(zip(tree_leaves(fakes), tree_leaves(batch), strict=True))
    watch = StorageWatch(device)
    for members in reachable_from(fake_model, fakes[0], fakes[1]).tensors.values():
        for tensor in members.values():
            watch.see(tensor)
    resident = watch.current
    with copies.mode, _as_in_eager(device), watch, known:
        outputs = fake_model(*fakes[0], **fakes[1])
        held = go_back(outputs, watch)
    return PlainStep(watch.finished(), resident, held, device, watch.calls, assumes=known.assumes)


@contextmanager
def _as_in_eager(device: torch.device) -> Iterator[None]:
    """Fake tensors with real layouts, and code that does not know that it is followed."""
    with (
        torch.enable_grad(),
        true_sizes_of_fused_layers(),
        fake_results_through(corrected),
        as_if_untraced(),
        masks_by_value(),
        _same_random_numbers(device),
    ):
        yield


class _KnownValues(DispatchMode):
    """Computes what is small and follows from what is known, so that the step may look at it."""

    def __init__(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        super().__init__()
        self.assumes = False
        """Whether a value was asked for that nobody knows."""
        self._values: dict[int, tuple[weakref.ref[Any], torch.Tensor]] = {}
        for fake, real in pairs:
            if isinstance(real, torch.Tensor) and not isinstance(real, FakeTensor):
                self._learn(fake, real.detach())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self.run_within(func, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        looks = not _LOOKS.isdisjoint(func.tags)
        if schema_of(func).is_mutable:
            for tensor in tensors:
                self._values.pop(id(tensor), None)
            return func(*args, **kwargs)
        is_known = all(id(tensor) in self._values for tensor in tensors)
        if func is torch.ops.aten._local_scalar_dense.default and not is_known and args[0].dtype in _ASSUMED:
            self.assumes = True
            return _ASSUMED[args[0].dtype]
        if not is_known or (func.is_view and not looks):
            return self._view(func, args, kwargs, tensors) if func.is_view else func(*args, **kwargs)
        real = tree_map(self._value, (args, kwargs))
        if looks:
            with without_modes():
                found = func(*real[0], **real[1])
            return tree_map(self._faked, found)
        result = func(*args, **kwargs)
        self._compute(func, real, result)
        return result

    def _view(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        result = func(*args, **kwargs)
        if all(id(tensor) in self._values for tensor in tensors):
            self._compute(func, tree_map(self._value, (args, kwargs)), result)
        return result

    def _compute(self, func: Any, real: tuple[Any, Any], result: Any) -> None:
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not made or any(leaf.numel() > MOST_KNOWN or leaf.requires_grad for leaf in made):
            return
        with without_modes(), torch.no_grad():
            found = [leaf for leaf in tree_leaves(func(*real[0], **real[1])) if isinstance(leaf, torch.Tensor)]
        for fake, value in zip(made, found, strict=True):
            self._learn(fake, value)

    def _learn(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        if value.numel() <= MOST_KNOWN:
            place = id(fake)
            self._values[place] = (weakref.ref(fake, lambda _: self._values.pop(place, None)), value)

    def _value(self, item: Any) -> Any:
        return self._values[id(item)][1] if isinstance(item, torch.Tensor) else item

    def _faked(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        fake = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device)
        self._learn(fake, item)
        return fake


def _refuse_hooks(model: nn.Module) -> None:
    """Hooks may keep what they see: a list of activations must not come to hold fake ones."""
    for name, module in model.named_modules():
        for hook in hooks_of(module):
            owner = getattr(hook, "__module__", None) or type(hook).__module__
            if not owner.startswith(_HARMLESS):
                raise EagerUnknown(f"module `{name}` has a hook, which would see fake tensors")


@contextmanager
def _same_random_numbers(device: torch.device) -> Iterator[None]:
    """Leave generators where they are: torch's, and those of Python and NumPy, which masks of speech are drawn from."""
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=generator_indices(device)):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
