"""Fake tensors: what their kernels say, where they are wrong or refuse, and turning real tensors into them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    disable_fake_tensor_cache,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

FAKED_WRONGLY = frozenset({torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten._cudnn_rnn.default})
"""Fused ops whose fake results have the wrong sizes; their backwards read opaque blocks that only they can write."""


Layout = tuple[Sequence[int], Sequence[int], int]
"""Shape, strides and offset."""


def on_storage(
    storage: torch.UntypedStorage, like: torch.Tensor, device: torch.device, layout: Layout | None = None
) -> torch.Tensor:
    """A fake tensor on a fake storage, of the dtype of `like` and laid out as it is, or as told; to be called in a fake
    mode.
    """
    fake = torch.empty(0, dtype=like.dtype, device=device)
    # What this call is remembered by holds the storage, while the process runs.
    with disable_fake_tensor_cache(fake.fake_mode):
        shape, stride, offset = layout or (like.shape, like.stride(), like.storage_offset())
        return fake.set_(storage, offset, shape, stride)


def answer_as(real: torch.Tensor, fake: Any) -> None:
    """Let a fake tensor of one element answer `item()` as the real one does."""
    with _disable_current_modes():
        fake.item_memo = real.item()


def _ask_a_real_run(mode: FakeTensorMode, op: Any, *args: Any, **kwargs: Any) -> Any:
    """What `op` really returns, as fake tensors."""

    def real(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        return torch.zeros(item.shape, dtype=item.dtype, device=item.device)

    def fake(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device)

    with _disable_current_modes():
        found = _call_in_any_precision(op, tree_map(real, (args, kwargs)))
    with mode:
        return tree_map(fake, found)


def _call_in_any_precision(op: Any, arguments: Any) -> Any:
    """Where the machine has no such kernel in low precision: sizes and strides are those of full precision."""
    try:
        return call_in_grad_mode(op, *arguments[0], **arguments[1])
    except RuntimeError:
        lowered = next((item.dtype for item in tree_leaves(arguments) if _is_lowered(item)), None)
        if lowered is None:
            raise
        wide = tree_map(lambda item: item.float() if _is_lowered(item) else item, arguments)
        return tree_map(
            lambda item: item.to(lowered) if isinstance(item, torch.Tensor) and item.is_floating_point() else item,
            call_in_grad_mode(op, *wide[0], **wide[1]),
        )


def _is_lowered(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype in (torch.bfloat16, torch.float16)


_REFUSED_AS_FAKE = (torch.ops.aten._grouped_mm.default,)
"""Ops whose fake versions take bf16 alone, though kernels take more."""


def _ask_where_refused(mode: FakeTensorMode, op: Any, *args: Any, **kwargs: Any) -> Any:
    is_here = args[0].device.type == "cpu" or torch.cuda.is_available()
    if args[0].dtype is torch.bfloat16 or not is_here:
        return NotImplemented
    return _ask_a_real_run(mode, op, *args, **kwargs)


DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised where an op on fake tensors would have to look at values."""


@contextlib.contextmanager
def true_sizes_of_fused_layers() -> Iterator[None]:
    """Let ops whose fake versions err tell the sizes of their results by a run on zeros, while tensors are fake."""
    with _answered(dict.fromkeys(FAKED_WRONGLY, _ask_a_real_run)), refused_fakes_asked():
        yield


def refused_fakes_asked() -> contextlib.AbstractContextManager[None]:
    """The same for ops whose fake versions refuse what eager takes."""
    return _answered(dict.fromkeys(_REFUSED_AS_FAKE, _ask_where_refused))


@contextlib.contextmanager
def _answered(answers: dict[Any, Callable[..., Any]]) -> Iterator[None]:
    before = {op: op_implementations_dict.get(op) for op in answers}
    op_implementations_dict.update(answers)
    try:
        yield
    finally:
        for op, answer in before.items():
            op_implementations_dict.pop(op)
            if answer is not None:
                op_implementations_dict[op] = answer


@contextlib.contextmanager
def fake_results_through(correct: Callable[..., Any]) -> Iterator[None]:
    """Let `correct(op, args, kwargs, result, make)` change what fake ops return, in this and all other threads.

    `make(shape, strides, elements of the storage, like)` makes the fake tensor to return instead.
    """
    dispatch = FakeTensorMode.dispatch

    def corrected(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = dispatch(mode, func, types, args, kwargs or {})
        if result is NotImplemented:
            # A tensor of another kind, as DTensor is, answers itself, by ops of its parts.
            return result

        def make(shape: Sequence[int], strides: Sequence[int], elements: int, like: torch.Tensor) -> torch.Tensor:
            base = torch.empty(elements, dtype=like.dtype, device=like.device)
            return base.as_strided(shape, strides)

        with mode:
            return correct(func, args, kwargs or {}, result, make)

    if dispatch.__name__ == corrected.__name__:
        yield
        return
    FakeTensorMode.dispatch = corrected
    try:
        yield
    finally:
        FakeTensorMode.dispatch = dispatch


@contextlib.contextmanager
def fakes_can_be_converted() -> Iterator[None]:
    """Let `module.to(...)` work on fake parameters.

    torch wants to swap their contents, which it refuses while anything refers to them weakly, as fake mode does.
    Here converted parameters take the place of the old ones; tied ones stay tied.
    """
    original = torch.nn.Module._apply
    known: dict[tuple[int, int], tuple[Any, Any, Any]] = {}

    def converted(convert: Any, tensor: torch.Tensor) -> Any:
        key = (id(convert), id(tensor))
        if key not in known:
            # The old ones are kept, too: an identity must not be given out twice.
            with torch.no_grad():
                known[key] = (convert, tensor, convert(tensor))
        return known[key][2]

    def apply(module: Any, convert: Any, recurse: bool = True) -> Any:
        for child in module.children() if recurse else ():
            child._apply(convert)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found = converted(convert, parameter)
                if not isinstance(found, torch.nn.Parameter):
                    found = torch.nn.Parameter(found, parameter.requires_grad)
                    known[(id(convert), id(parameter))] = (convert, parameter, found)
                module._parameters[name] = found
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = converted(convert, buffer)
        return module

    torch.nn.Module._apply = apply
    try:
        yield
    finally:
        torch.nn.Module._apply = original


def call_in_grad_mode(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op that looks at the grad mode to decide what it returns, without recording a graph."""
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        return op(*args, **kwargs)


ASK_GRAD_MODE = frozenset({torch.ops.aten.mkldnn_rnn_layer.default})
"""Ops that return what their backward needs only while gradients are enabled."""
