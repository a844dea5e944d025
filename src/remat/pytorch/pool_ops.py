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
    rows, columns = pool.starts(output)
    start, outside = rows * input.shape[-1] + columns, _outside(rows, columns, output)
    for piece in pieces_of(output, PIECES):
        indices = torch.empty_like(output[piece], dtype=torch.int64)
        aten.max_pool2d_with_indices.out(input[piece], *pool.args, out=output[piece], indices=indices)
        nowhere = None if outside is None else (indices == 0).logical_and_(outside)
        apart = _with_rows_of(pool.window[1], indices.sub_(start).float(), before=input.shape[-1])
        offsets[piece].copy_(apart if nowhere is None else apart.masked_fill_(nowhere, NOWHERE))
    return output, offsets


def _max_pool2d_backward(
    grad: torch.Tensor, offsets: torch.Tensor, size: Sequence[int], layout: Sequence[int], *how: Any
) -> torch.Tensor:
    pool = Pool.of(*how)
    result = torch.empty_strided(size, layout, dtype=grad.dtype, device=grad.device)
    rows, columns = pool.starts(offsets)
    start, outside = rows * size[-1] + columns, _outside(rows, columns, offsets)
    for piece in pieces_of(offsets, PIECES):
        indices = _with_rows_of(size[-1], offsets[piece].float(), before=pool.window[1]).long().add_(start)
        if outside is not None:
            indices.masked_fill_(offsets[piece] == NOWHERE, 0)
        # In place of its input, of which the kernel reads shape and layout.
        aten.max_pool2d_with_indices_backward.grad_input(
            grad[piece], result[piece], *pool.args, indices, grad_input=result[piece]
        )
    return result


def _with_rows_of(width: int, places: torch.Tensor, before: int) -> torch.Tensor:
    """Numbers that count elements in rows of `before` elements, counted in rows of `width`; `places` is changed.

    In fp32, which is several times faster than dividing integers. It is exact below `MOST_PLACES`: half an element
    beyond its place, no quotient is as near to an integer as its rounding error.
    """
    rows = places.add(0.5).mul_(1 / before).floor_()
    return places.add_(rows, alpha=width - before)


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
