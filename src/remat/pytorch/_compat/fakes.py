"""Fake tensors: what their kernels say, where they are wrong or refuse, and turning real tensors into them."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo import utils as dynamo_utils
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

from remat.pytorch._compat.replaced import replaced

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


class FakeLike:
    """Makes fake tensors like one: read once, and without its constructor, that takes a tenth of the time."""

    __slots__ = ("_device", "_dtype", "_fills_storage", "_shape", "_size_bytes", "_state", "_stride", "offset")

    def __init__(self, like: Any) -> None:
        self._shape, self._stride, self.offset = tuple(like.shape), like.stride(), like.storage_offset()
        self._dtype, self._device, self._state = like.dtype, like.device, {**like.__dict__, "constant": None}
        self._size_bytes = like.untyped_storage().nbytes()
        packed = torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device="meta")
        self._fills_storage = not self.offset and packed.untyped_storage().nbytes() == self._size_bytes

    def made(self, storage: torch.UntypedStorage | None, offset: int) -> torch.Tensor:
        """At this offset of a fake storage, or on one of its own; to be called outside of all modes."""
        if storage is None and self._fills_storage:
            inner = torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device="meta")
        else:
            storage = torch.UntypedStorage(self._size_bytes, device="meta") if storage is None else storage
            inner = torch.empty(0, dtype=self._dtype, device="meta").set_(storage, offset, self._shape, self._stride)
        fake = torch.Tensor._make_subclass(
            FakeTensor, inner, False, dispatch_device=True, device_for_backend_keys=self._device
        )
        fake.__dict__.update(self._state)
        return fake


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


@contextlib.contextmanager
def calls_remembered() -> Iterator[None]:
    """Let Dynamo find out once what a function of torch returns for arguments that are laid out alike.

    A recurrence calls the same functions with the same layouts at every step, and Dynamo runs each call on fake
    tensors. Remembered are calls that write to nothing, and whose results are tensors on storages of their own.
    """
    known: dict[Any, tuple[type, list[tuple[FakeLike, bool]]]] = {}

    def remembering(run_node: Any) -> Any:
        def run(tracer: Any, node: Any, args: Any, kwargs: Any, module: Any) -> Any:
            key = _key_of(node, args, kwargs)
            if key is not None and key in known:
                return _made_again(*known[key])
            given = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
            versions = [item._version for item in given] if key is not None else []
            result = run_node(tracer, node, args, kwargs, module)
            if key is not None and versions == [item._version for item in given] and _is_new(result, given):
                known[key] = (type(result), [(FakeLike(item), item.requires_grad) for item in _members(result)])
            return result

        return run

    with replaced(dynamo_utils, "run_node", remembering):
        yield


def _key_of(node: Any, args: Any, kwargs: Any) -> Any:
    """The same for calls that return the same; None for what is not remembered."""
    is_known = node.op == "call_method" or (node.op == "call_function" and type(node.target) in _BUILTIN)
    if not is_known or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return None
    try:
        addresses: dict[int, int] = {}
        described = _described_call((args, kwargs), addresses)
        # Without a tensor nobody tells for which of Dynamo's frames, each with a mode of its own, a result is.
        return (node.target, described, torch.is_grad_enabled(), torch.get_default_dtype()) if addresses else None
    except _Untold:
        return None


class _Untold(Exception):
    """Something about a call cannot be compared."""


_BUILTIN = (types.BuiltinFunctionType, types.BuiltinMethodType)
_COMPARED = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout, type(...))


def _described_call(item: Any, addresses: dict[int, int]) -> Any:
    """Arguments, with tensors as their layouts and as which of them share a storage."""
    kind = type(item)
    if isinstance(item, (tuple, list)):
        return kind, tuple(_described_call(member, addresses) for member in item)
    if isinstance(item, dict):
        return tuple((key, _described_call(member, addresses)) for key, member in item.items())
    if kind in _COMPARED:
        return kind, item
    is_plain = type(item) is FakeTensor and item.constant is None and item.layout is torch.strided
    if not is_plain or any(type(number) is not int for number in (*item.shape, *item.stride())):
        raise _Untold
    stored = addresses.setdefault(item.untyped_storage()._cdata, len(addresses))
    # What is remembered keeps its mode alive, so that no other one has its identity.
    facts = (
        item.dtype,
        item.device,
        item.requires_grad,
        item.is_leaf,
        item.is_conj(),
        item.is_neg(),
        id(item.fake_mode),
    )
    return tuple(item.shape), item.stride(), stored, *facts


def _members(result: Any) -> tuple[Any, ...]:
    return tuple(result) if type(result) in (tuple, list) else (result,)


def _is_new(result: Any, given: Sequence[torch.Tensor]) -> bool:
    """Whether a result is tensors that share their storages with nothing."""
    found = _members(result)
    if not found or any(type(item) is not FakeTensor or item.constant is not None for item in found):
        return False
    if any(item._is_view() or item.layout is not torch.strided or item.is_leaf == item.requires_grad for item in found):
        return False
    if any(type(number) is not int for item in found for number in (*item.shape, *item.stride())):
        return False
    return len({item.untyped_storage()._cdata for item in (*found, *given)}) == len(
        {item.untyped_storage()._cdata for item in given}
    ) + len(found)


def _made_again(kind: type, like: Sequence[tuple[FakeLike, bool]]) -> Any:
    with _disable_current_modes():
        made = tuple(item.made(None, item.offset) for item, _ in like)
    needed = [needs for _, needs in like]
    if any(needed):
        flag = torch.Tensor._make_subclass(torch.Tensor, torch.empty(0, device="meta"), True)
        made = _Computed.apply(flag, needed, made)
    return made[0] if kind not in (tuple, list) else kind(made)


class _Computed(torch.autograd.Function):
    """What an op has computed: no leaf, so that the step may change it in place."""

    @staticmethod
    def forward(ctx: Any, flag: torch.Tensor, differentiable: Sequence[bool], made: tuple[torch.Tensor, ...]) -> Any:
        ctx.mark_non_differentiable(*(item for item, is_so in zip(made, differentiable, strict=True) if not is_so))
        return made
