"""Max pooling that keeps one byte for each result: where in its window the largest element was.

Eager keeps its index in the plane, eight bytes. `remat::max_pool2d` runs eager's kernel some images at a time and turns
indices into offsets inside the window, row by row; `remat::max_pool2d_backward` turns them back, as many images at a
time, for eager's backward kernel. That kernel reads nothing of the pool's input but its shape, so backward does not
need the input. Windows are counted with the gaps that dilation leaves; more than 255 elements do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat.pytorch.ops import pieces_of

aten = torch.ops.aten
PIECES = 8
"""In how many pieces a batch is pooled, at most: what a piece needs for itself is small beside what is saved."""
NOWHERE = 255
"""A window of nothing but -inf: CUDA's kernel for channels-last images gives index 0, wherever the window is."""
MOST_PLACES = 2**20
EXACT = 2**24
"""Integers below this are exact in fp32."""

_HOW = "int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode"
_library = torch.library.Library("remat", "FRAGMENT")
_library.define(f"max_pool2d(Tensor input, {_HOW}) -> (Tensor, Tensor)")
_library.define(f"max_pool2d_backward(Tensor grad, Tensor offsets, SymInt[] size, SymInt[] layout, {_HOW}) -> Tensor")


@dataclass(frozen=True, slots=True)
class Pool:
    """How windows lie over an image; pairs are of height and width."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    ceil_mode: bool

    @classmethod
    def of(cls, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False) -> Pool:
        """From the arguments of `aten.max_pool2d_with_indices` after the first."""
        return cls(_pair(kernel), _pair(stride or kernel), _pair(padding), _pair(dilation), bool(ceil_mode))

    @property
    def args(self) -> tuple[Any, ...]:
        return (*map(list, (self.kernel, self.stride, self.padding, self.dilation)), self.ceil_mode)

    @property
    def window(self) -> tuple[int, int]:
        height, width = ((size - 1) * gap + 1 for size, gap in zip(self.kernel, self.dilation, strict=True))
        return height, width

    def fits_a_byte(self, image: Sequence[int], result: Sequence[int]) -> bool:
        """Whether an offset does; a window that holds no element at all has an index that is not inside it."""
        height, width = self.window
        if height * width > NOWHERE or width > image[1] or height * image[1] > MOST_PLACES:
            return False
        return all(self._meets_every_window(dim, image, result) for dim in (0, 1))

    def _meets_every_window(self, dim: int, image: Sequence[int], result: Sequence[int]) -> bool:
        for number in range(result[dim]):
            first = number * self.stride[dim] - self.padding[dim]
            if first < 0:
                first %= self.dilation[dim]
            last = number * self.stride[dim] - self.padding[dim] + self.window[dim] - 1
            if first > min(last, image[dim] - 1):
                return False
        return True

    def starts(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """First row and first column of each window; results are shaped as `like`."""
        rows, columns = (
            torch.arange(-pad, count * step - pad, step, device=like.device)
            for count, step, pad in zip(like.shape[-2:], self.stride, self.padding, strict=True)
        )
        return rows[:, None], columns


def _pair(value: Any) -> tuple[int, int]:
    first, *rest = value if isinstance(value, (list, tuple)) else (value,)
    return int(first), int(rest[0] if rest else first)


def _max_pool2d(input: torch.Tensor, *how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    pool = Pool.of(*how)
    output = _empty_output(input, pool)
    offsets = torch.empty_like(output, dtype=torch.uint8)
    work = _Work.of(output, pool, input.shape)
    # Those that fit into a signed byte are narrowed several times faster.
    narrow = torch.uint8 if pool.window[0] * pool.window[1] > 127 or work.outside is not None else torch.int8
    for piece in work.pieces:
        indices, places, rows = work.cut(output[piece])
        aten.max_pool2d_with_indices.out(input[piece], *pool.args, out=output[piece], indices=indices)
        nowhere = None if work.outside is None else (indices == 0).logical_and_(work.outside)
        work.subtract_starts(indices, places)
        _count_in_rows_of(pool.window[1], places, rows, before=input.shape[-1])
        if nowhere is not None:
            places.masked_fill_(nowhere, NOWHERE)
        offsets[piece].view(narrow).copy_(places)
    return output, offsets


def _max_pool2d_backward(
    grad: torch.Tensor, offsets: torch.Tensor, size: Sequence[int], layout: Sequence[int], *how: Any
) -> torch.Tensor:
    pool = Pool.of(*how)
    result = torch.empty_strided(size, layout, dtype=grad.dtype, device=grad.device)
    work = _Work.of(offsets, pool, size)
    for piece in work.pieces:
        indices, places, rows = work.cut(offsets[piece])
        places.copy_(offsets[piece])
        _count_in_rows_of(size[-1], places, rows, before=pool.window[1])
        work.add_starts(places, indices)
        if work.outside is not None:
            indices.masked_fill_(offsets[piece] == NOWHERE, 0)
        # In place of its input, of which the kernel reads shape and layout.
        aten.max_pool2d_with_indices_backward.grad_input(
            grad[piece], result[piece], *pool.args, indices, grad_input=result[piece]
        )
    return result


@dataclass(frozen=True, slots=True)
class _Work:
    """What is computed for one piece after the other, in the same memory: fresh memory is slow to write to."""

    pieces: list[slice]
    indices: torch.Tensor
    places: torch.Tensor
    rows: torch.Tensor
    start: torch.Tensor
    """The index of each window's first element, in fp32 where that is exact."""
    outside: torch.Tensor | None

    @classmethod
    def of(cls, results: torch.Tensor, pool: Pool, size: Sequence[int]) -> _Work:
        """For the pool's `results`, or what is shaped like them, of images of this size."""
        pieces = list(pieces_of(results, PIECES))
        first = results[pieces[0]] if pieces else results
        rows, columns = pool.starts(results)
        start = rows * size[-1] + columns
        return cls(
            pieces,
            torch.empty_like(first, dtype=torch.int64),
            torch.empty_like(first, dtype=torch.float32),
            torch.empty_like(first, dtype=torch.float32),
            start.float() if (size[-2] + pool.padding[0]) * (size[-1] + pool.padding[1]) < EXACT else start,
            _outside(rows, columns, results),
        )

    def cut(self, piece: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Memory for indices, places and rows of a piece; the last may be shorter."""
        count = len(piece)
        return self.indices[:count], self.places[:count], self.rows[:count]

    def subtract_starts(self, indices: torch.Tensor, places: torch.Tensor) -> None:
        """From indices in the image to those in the window's rows of the image; `indices` may be changed."""
        if self.start.is_floating_point():
            places.copy_(indices).sub_(self.start)
        else:
            places.copy_(indices.sub_(self.start))

    def add_starts(self, places: torch.Tensor, indices: torch.Tensor) -> None:
        """And back; `places` may be changed."""
        if self.start.is_floating_point():
            indices.copy_(places.add_(self.start))
        else:
            indices.copy_(places).add_(self.start)


def _count_in_rows_of(width: int, places: torch.Tensor, rows: torch.Tensor, before: int) -> None:
    """Elements that were counted in rows of `before` are counted in rows of `width`; `rows` is memory to work in.

    In fp32, which is several times faster than dividing integers. It is exact below `MOST_PLACES`: half an element
    beyond its place, no quotient is as near to an integer as its rounding error.
    """
    torch.add(places, 0.5, out=rows).mul_(1 / before).floor_()
    places.add_(rows, alpha=width - before)


def _outside(rows: torch.Tensor, columns: torch.Tensor, images: torch.Tensor) -> torch.Tensor | None:
    """Windows in which index 0 is not, where a kernel may give it all the same."""
    is_channels_last = images.is_contiguous(memory_format=torch.channels_last)
    return (rows > 0) | (columns > 0) if images.is_cuda and is_channels_last else None


def _empty_output(input: torch.Tensor, pool: Pool) -> torch.Tensor:
    """As eager lays it out; found without computing anything."""
    described = torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device="meta")
    output, _ = aten.max_pool2d_with_indices(described, *pool.args)
    return torch.empty_strided(output.shape, output.stride(), dtype=input.dtype, device=input.device)


_library.impl("max_pool2d", _max_pool2d, "CompositeExplicitAutograd")
_library.impl("max_pool2d_backward", _max_pool2d_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("remat::max_pool2d", lib=_library)
def _fake_max_pool2d(input: torch.Tensor, *how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    output, _ = aten.max_pool2d_with_indices(input, *Pool.of(*how).args)
    return output, torch.empty_like(output, dtype=torch.uint8)


@torch.library.register_fake("remat::max_pool2d_backward", lib=_library)
def _fake_max_pool2d_backward(
    grad: torch.Tensor, offsets: torch.Tensor, size: Sequence[int], layout: Sequence[int], *how: Any
) -> torch.Tensor:
    return torch.empty_strided(size, layout, dtype=grad.dtype, device=grad.device)
