"""What a kernel really returns, where a fake tensor only guesses: strides, and the size of the storage.

In: an op, its fake arguments and its fake result. Out: the result, corrected. Several of torch's fake versions tell
other strides than the kernels give where an argument is not contiguous (batch norm, the gradient of softmax), and the
scalar of some losses sits on a storage as large as their input. Bits depend on strides, since a sum follows memory
order, and bytes depend on storages. So each kind of call is run once for real, on small tensors of zeros that are laid
out like the arguments, and the answer is kept while the process lives. A call that fails on such tensors is believed.

A real run also answers whether an op that writes into one of its arguments gives the bits that it gives elsewhere.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from remat.pytorch._compat.modes import without_autocast, without_modes
from remat.pytorch._compat.tensors import schema_of, storage_address
from remat.pytorch.device import generator_indices
from remat.pytorch.kernel_choice import kernel_choice_kept, onednn_is_used

LARGEST_KEPT = 8
"""Dimensions up to this size stay when arguments are made smaller: heads, taps, channels of an image."""
MOST_BYTES = 2**25
"""Arguments above this are not made in full where smaller ones do not fit together."""
LARGEST_KEPT_OF_CONVOLUTIONS = 17
"""Which kernel convolves, and with it the layout of its result, is decided by the size of the batch and of the taps."""
TRIAL_SIZE = 19
"""Dimensions from here on are what overwriting is tried on: longer than a vector, and no multiple of one."""
_NAMESPACES = ("aten", "remat")
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError)
"""What ops raise that cannot work with made-up arguments."""
_OPAQUE = ("rnn", "attention", "quant", "custom_backward", "cudnn", "grouped_mm", "_fused", "_thnn", "sparse")
"""Parts of the names of ops that read blocks which only another op can write: made-up ones could crash them."""
ASSERTS = "assert_async"
"""Part of the names of ops that check their argument: on CUDA one that is made up ends the process."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a dense tensor lies in memory, whatever its sizes are."""

    order: tuple[int, ...]
    """Its dimensions from the largest stride to the smallest."""
    room: int | None
    """Its storage has room for the elements of this tensor argument, or of all of them broadcast where there is none
    with this number; None for its own elements."""
    is_regular: bool
    """Whether dimensions of one element have the strides that follow from the order, too: layouts are told by them."""

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        found, packed = [0] * len(shape), 1
        for dim in reversed(self.order):
            found[dim] = packed
            packed *= max(1, shape[dim])
        return tuple(found)


Answer = tuple[Layout | None, ...] | None
"""For each tensor of a result; None where nothing is known."""
_answers: dict[Any, Answer] = {}
_agreements: dict[Any, bool] = {}


def corrected(op: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, make: Callable[..., Any]) -> Any:
    """`result` with the strides and storages that the kernel would give; `make` makes fake tensors.

    It is called as `make(shape, strides, elements of the storage, like)`.
    """
    if op in _VIEWS:
        return _corrected_view(args, result)
    tensors = [*tensors_of(args), *tensors_of(tuple(kwargs.values()))]
    if not is_asked(op, tensors):
        return result
    answer = _answer(op, args, kwargs, tensors)
    results = [result] if isinstance(result, torch.Tensor) else list(result or ())
    if answer is None or len(answer) != len(results):
        return result
    addresses = [storage_address(tensor) for tensor in (*tensors, *tensors_of(results))]
    found = [
        _laid_out(fake, layout, tensors, make)
        if isinstance(fake, torch.Tensor) and addresses.count(storage_address(fake)) == 1
        else fake
        for layout, fake in zip(answer, results, strict=True)
    ]
    if all(one is other for one, other in zip(found, results, strict=True)):
        return result
    return found[0] if isinstance(result, torch.Tensor) else (found if isinstance(result, list) else tuple(found))


def _answer(op: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Answer:
    kept = LARGEST_KEPT_OF_CONVOLUTIONS if "convolution" in op.name() else LARGEST_KEPT
    told_apart = 2 if kept == LARGEST_KEPT else kept + 1
    key = (op, onednn_is_used(), _pattern(args, told_apart), _pattern(tuple(kwargs.items()), told_apart))
    if key not in _answers:
        _answers[key] = _ask(op, args, kwargs, tensors, kept)
    return _answers[key]


def _laid_out(
    fake: torch.Tensor, layout: Layout | None, tensors: Sequence[torch.Tensor], make: Callable[..., Any]
) -> Any:
    """A result as its kernel lays it out: itself, where it is so already."""
    if layout is None or len(layout.order) != fake.dim():
        return fake
    strides = layout.strides(fake.shape)
    sizes = [tensor.numel() for tensor in tensors]
    elements = fake.numel() if layout.room is None else _room(tensors, sizes, layout.room)
    is_other = strides != fake.stride() if layout.is_regular else _differ(strides, fake)
    if is_other or elements * fake.element_size() > fake.untyped_storage().nbytes():
        return make(tuple(fake.shape), strides, elements, fake)
    return fake


def _corrected_view(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """The same view with the strides that C++ gives dimensions of one element; the fake version gives others."""
    base = args[0]
    if 1 not in result.shape or not result.numel() or not _is_plain(base) or not _is_plain(result):
        return result
    strides = view_strides(base.shape, base.stride(), result.shape)
    return result if strides in ((), result.stride()) else result.as_strided(result.shape, strides)


def view_strides(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """The strides that a view in another shape gets from C++; none where it has to be a copy.

    From the last dimension on, runs of dimensions that lie one after the other are shared out among the new ones; a
    new dimension of one element belongs to the run that has just been used up.
    """
    found, left, step = [0] * len(wanted), len(wanted) - 1, strides[-1] if len(strides) else 1
    run = 1
    for dim in reversed(range(len(shape))):
        run *= shape[dim]
        goes_on = dim > 0 and (shape[dim - 1] == 1 or strides[dim - 1] == run * step)
        if goes_on:
            continue
        used = 1
        while left >= 0 and (used < run or wanted[left] == 1):
            found[left] = used * step
            used *= wanted[left]
            left -= 1
        if used != run:
            return ()
        step, run = strides[dim - 1] if dim else step, 1
    return tuple(found) if left == -1 else ()


def is_asked(op: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a real run can tell something of this call."""
    schema = schema_of(op)
    if schema is None or not tensors or schema.is_mutable or op.namespace not in _NAMESPACES:
        return False
    if any(result.alias_info is not None for result in schema.returns) or any(
        part in op.name() for part in (*_OPAQUE, ASSERTS)
    ):
        return False
    if torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags:
        return False
    return all(_is_plain(tensor) for tensor in tensors)


def tensors_of(arguments: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Tensors among arguments, and in lists and tuples among them."""
    for item in arguments:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from tensors_of(item)


def overwrites_exactly(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], place: int, call: Callable[..., Any]
) -> bool:
    """Whether `call`, which writes the result of `op` into argument number `place`, gives the same bits there.

    Tried on random tensors that are laid out like the arguments. `call` is made as `call(args, kwargs, into)`.
    """
    tensors = [*tensors_of(args), *tensors_of(tuple(kwargs.values()))]
    if not all(_is_plain(tensor) for tensor in tensors):
        return False
    key = (op, place, _pattern(args), _pattern(tuple(kwargs.items())))
    if key not in _agreements:
        _agreements[key] = any(
            _agrees(op, args, kwargs, place, call, fill) for fill in (torch.Tensor.normal_, torch.Tensor.uniform_)
        )
    return _agreements[key]


def _agrees(op: Any, args: Sequence[Any], kwargs: dict[str, Any], place: int, call: Any, fill: Any) -> bool:
    tensors = list(tensors_of((args, tuple(kwargs.values()))))
    try:
        with _aside(tensors[0].device):
            real = _Maker(_smaller(tensors, TRIAL_SIZE), fill)
            made, named = real.all(args), {name: real.one(item) for name, item in kwargs.items()}
            wanted = op(*made, **named)
            found = call(made, named, made[place])
            is_there = found.data_ptr() == made[place].data_ptr() and found.stride() == wanted.stride()
            return is_there and _same_bits(found, wanted)
    except REFUSALS:
        return False


def _same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """NaN is like itself here, and 0 unlike -0."""
    one, other = (item.contiguous().view(-1).view(torch.uint8) for item in (found, wanted))
    return found.shape == wanted.shape and torch.equal(one, other)


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """Run ops for real in the middle of a trace, and leave no mark on generators or the user's screen."""
    generators = generator_indices(device)
    with without_modes(), torch.no_grad(), torch.random.fork_rng(generators), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with without_autocast(), kernel_choice_kept():
            yield


def _ask(op: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor], kept: int) -> Answer:
    """Run the op on small arguments or, where those do not fit together, on arguments of full size."""
    small = _smaller(tensors, kept + 1)
    for sizes, widens in ((small, False), (small, True), ({}, False)):
        if not sizes and sum(tensor.untyped_storage().nbytes() for tensor in tensors) > MOST_BYTES:
            return None
        try:
            with _aside(tensors[0].device):
                real = _Maker(sizes, torch.Tensor.zero_, widens=widens)
                made, named = real.all(args), {name: real.one(item) for name, item in kwargs.items()}
                result = op(*made, **named)
                taken = [*tensors_of(made), *tensors_of(tuple(named.values()))]
                results = [result] if isinstance(result, torch.Tensor) else result
                return tuple(_layout(item, taken) for item in results)
        except REFUSALS:
            continue
    return None


def _layout(result: Any, taken: Sequence[torch.Tensor]) -> Layout | None:
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return None
    order = tuple(sorted(range(result.dim()), key=lambda dim: (-result.stride(dim), dim)))
    strides = Layout(order, None, True).strides(result.shape)
    if _differ(strides, result) or storage_address(result) in map(storage_address, taken):
        return None
    is_regular = strides == result.stride() and result.numel() > 0
    elements = result.untyped_storage().nbytes() // result.element_size()
    if elements == max(1, result.numel()) or elements == result.numel():
        return Layout(order, None, is_regular)
    sizes = [tensor.numel() for tensor in taken]
    rooms = (place for place in range(len(sizes) + 1) if _room(taken, sizes, place) == elements)
    return Layout(order, next(rooms, None), is_regular)


def _room(tensors: Sequence[torch.Tensor], sizes: Sequence[int], place: int) -> int:
    if place < len(sizes):
        return sizes[place]
    try:
        return math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
    except RuntimeError:
        return 0


def _differ(strides: Sequence[int], tensor: torch.Tensor) -> bool:
    """Whether a tensor has other strides, in dimensions where that makes a difference."""
    pairs = zip(tensor.shape, strides, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and one != other for size, one, other in pairs)


class _Maker:
    """Makes real arguments from fake ones."""

    def __init__(self, sizes: dict[int, int], fill: Callable[[torch.Tensor], Any], *, widens: bool = False) -> None:
        self._sizes = sizes
        self._fill = fill
        # Statistics of norms are more precise than fake tensors have them.
        self._widens = widens
        self._known: dict[int, torch.Tensor] = {}

    def all(self, arguments: Sequence[Any]) -> list[Any]:
        return [self.one(item) for item in arguments]

    def one(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if id(item) not in self._known:
                self._known[id(item)] = self._tensor(item)
            return self._known[id(item)]
        if isinstance(item, (list, tuple)):
            return self.all(item)
        return self._sizes.get(item, item) if type(item) is int else item

    def _tensor(self, fake: torch.Tensor) -> torch.Tensor:
        shape = [self._sizes.get(size, size) for size in fake.shape]
        strides = fake.stride() if shape == list(fake.shape) else _smaller_strides(fake, shape)
        is_statistic = self._widens and fake.dim() == 1 and fake.dtype.is_floating_point
        dtype = torch.float32 if is_statistic else fake.dtype
        made = torch.empty_strided(shape, strides, dtype=dtype, device=fake.device)
        storage = made.as_strided((made.untyped_storage().nbytes() // made.element_size(),), (1,))
        if fake.dtype.is_floating_point or fake.dtype.is_complex:
            self._fill(storage)
        elif fake.dtype is torch.bool and self._fill is not torch.Tensor.zero_:
            storage.bernoulli_(0.5)
        else:
            # An integer may be an index, and zero is always one.
            storage.zero_()
        return made


def _smaller(tensors: Sequence[torch.Tensor], least: int) -> dict[int, int]:
    """Another size for each that occurs and is large, in the same order; 1 stays special, and so do small ones."""
    found = sorted({size for tensor in tensors for size in tensor.shape if size > least})
    return {size: min(size, least + 2 * place) for place, size in enumerate(found)}


def _smaller_strides(fake: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """Strides for `shape` in the same order, with gaps where there are gaps."""
    strides = fake.stride()
    found, packed, real = [0] * len(shape), 1, 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        if strides[dim] == 0:
            continue
        if strides[dim] < real and fake.shape[dim] > 1:
            raise ValueError("elements overlap")
        found[dim] = packed * (2 if strides[dim] > real else 1)
        packed = max(packed, found[dim] * max(1, shape[dim]))
        real = max(real, strides[dim] * max(1, fake.shape[dim]))
    return found


def _pattern(item: Any, told_apart: int = 2) -> Any:
    """The same for arguments that are laid out alike; other arguments stand for themselves.

    Sizes are told apart up to this one.
    """
    if isinstance(item, torch.Tensor):
        return _pattern_of(item, told_apart)
    if isinstance(item, (list, tuple)):
        return tuple(_pattern(member, told_apart) for member in item)
    return repr(item)


def _pattern_of(tensor: torch.Tensor, told_apart: int) -> tuple[Any, ...]:
    sizes, strides = tensor.shape, tensor.stride()
    kind = (tensor.dtype, tensor.device, tuple(min(size, told_apart) for size in sizes))
    if tensor.is_contiguous():
        return kind
    packed, gaps = 1, []
    order = sorted(range(len(sizes)), key=lambda dim: (strides[dim], -dim))
    for dim in order:
        gaps.append(0 if strides[dim] == 0 else 1 + (strides[dim] > packed) - (strides[dim] < packed) * 3)
        packed = max(packed, strides[dim] * sizes[dim])
    return (*kind, tuple(order), tuple(gaps))


def _is_plain(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or (tensor.device.type == "cuda" and not torch.cuda.is_available()):
        return False
    return all(type(size) is int for size in (*tensor.shape, *tensor.stride()))
