"""Ops that eager PyTorch computes in place and that functional tracing would compute differently.

Eager dropout on CPU draws zeros and ones in the memory order of its input, divides them by 1 - p and multiplies by
that; backward multiplies by it again, so eager keeps it, as wide as the input. `remat::dropout_mask` draws the same
zeros and ones, from the same generator state, as bytes; `remat::dropout` widens, scales and multiplies, forward and
backward alike: the same bits from a quarter of the memory. The mask reads nothing, so no schedule has to keep the
input for it.

`remat::bernoulli` draws zeros and ones in the memory order of the tensor that eager draws them into; torch's functional
version draws them in the order of its dimensions.

`remat::cross_entropy_backward` is the backward of a loss and of the log softmax before it, some rows at a time: eager
first writes a gradient as large as the logits that is zero but for one number a row.

`remat::relu_mask` says where a ReLU let its input through; `remat::relu_backward` hands it to eager's kernel in place
of the ReLU's result, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_library = torch.library.Library("remat", "DEF")
_library.define(
    "dropout_mask(SymInt[] size, SymInt[] stride, float p, *, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_library.define(
    "bernoulli(SymInt[] size, SymInt[] stride, float p, *, ScalarType dtype, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_library.define("dropout(Tensor input, Tensor mask, float p) -> Tensor")


def _dropout_mask(size: Sequence[int], stride: Sequence[int], p: float, *, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=torch.int8, device=device).bernoulli_(1 - p)


def _dropout(input: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    noise = mask.to(input.dtype).mul_(torch.ones((), dtype=input.dtype, device=input.device).div_(1 - p))
    # Where the layouts differ, the result has the one that torch gives a product.
    return noise.mul_(input) if noise.stride() == input.stride() else input * noise


def _bernoulli(
    size: Sequence[int], stride: Sequence[int], p: float, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device).bernoulli_(p)


_library.impl("bernoulli", _bernoulli, "CompositeExplicitAutograd")
_library.impl("dropout_mask", _dropout_mask, "CompositeExplicitAutograd")
_library.impl("dropout", _dropout, "CompositeExplicitAutograd")


def _remember_mask(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, float], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.p = inputs[2]


def _dropout_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return torch.ops.remat.dropout(grad, ctx.saved_tensors[0], ctx.p), None, None


torch.library.register_autograd("remat::dropout", _dropout_backward, setup_context=_remember_mask, lib=_library)


_LOSS = (
    "Tensor grad, Tensor log_probabilities, Tensor target, Tensor? weight, int reduction, SymInt ignore_index, "
    "Tensor total_weight"
)
_library.define(f"cross_entropy_backward({_LOSS}) -> Tensor")
_library.define(f"cross_entropy_backward.out({_LOSS}, *, Tensor(a!) out) -> Tensor(a!)")
CHUNKS = 16
"""Pieces in which the gradients of a loss and of a ReLU are computed."""
ROWS = 64
"""Pieces are multiples of this, so that every row has the alignment, and so the kernel, that it has in the whole."""


def _cross_entropy_backward(grad: torch.Tensor, log_probabilities: torch.Tensor, *loss: Any) -> torch.Tensor:
    return _cross_entropy_backward_out(grad, log_probabilities, *loss, out=torch.empty_like(log_probabilities))


def _cross_entropy_backward_out(
    grad: torch.Tensor, log_probabilities: torch.Tensor, target: torch.Tensor, *loss: Any, out: torch.Tensor
) -> torch.Tensor:
    aten, count = torch.ops.aten, len(target)
    rows = max(1, -(-count // (CHUNKS * ROWS))) * ROWS
    for start in range(0, count, rows):
        piece = slice(start, start + rows)
        of_loss = aten.nll_loss_backward(grad, log_probabilities[piece], target[piece], *loss)
        aten._log_softmax_backward_data.out(of_loss, log_probabilities[piece], 1, out.dtype, out=out[piece])
    return out


_library.impl("cross_entropy_backward", _cross_entropy_backward, "CompositeExplicitAutograd")
_library.impl("cross_entropy_backward.out", _cross_entropy_backward_out, "CompositeExplicitAutograd")

SMALLEST_PIECE = 2**18
"""Elements below which a tensor is not cut: starting a kernel would take longer than running it."""


def pieces_of(tensor: torch.Tensor, count: int) -> Iterator[slice]:
    """Up to `count` pieces of about the same size along the first dimension."""
    count = max(1, min(count, tensor.numel() // SMALLEST_PIECE))
    rows = max(1, -(-len(tensor) // count))
    return (slice(start, start + rows) for start in range(0, len(tensor), rows))


_library.define("relu_mask(Tensor output) -> Tensor")
_library.define("relu_backward(Tensor grad, Tensor mask) -> Tensor")
_library.define("relu_backward.out(Tensor grad, Tensor mask, *, Tensor(a!) out) -> Tensor(a!)")


def _relu_mask(output: torch.Tensor) -> torch.Tensor:
    # NaN is let through.
    return torch.le(output, 0).logical_not_()


def _relu_backward(grad: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _relu_backward_out(grad, mask, out=torch.empty_like(grad))


def _relu_backward_out(grad: torch.Tensor, mask: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    for piece in pieces_of(mask, CHUNKS):
        # Bytes are widened several times faster than what is called bool.
        widened = mask[piece].view(torch.uint8).to(grad.dtype)
        torch.ops.aten.threshold_backward.grad_input(grad[piece], widened, 0, grad_input=out[piece])
    return out


_library.impl("relu_mask", _relu_mask, "CompositeExplicitAutograd")
_library.impl("relu_backward", _relu_backward, "CompositeExplicitAutograd")
_library.impl("relu_backward.out", _relu_backward_out, "CompositeExplicitAutograd")

_library.define("custom_backward(str name, Tensor[] inputs, Tensor[] grads) -> Tensor[]")


@torch.library.register_fake("remat::custom_backward", lib=_library)
def _fake_custom_backward(name: str, inputs: list[torch.Tensor], grads: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(item) for item in inputs if item.is_floating_point()]


def define_custom_backward(run: Callable[..., list[torch.Tensor]]) -> None:
    """How `remat::custom_backward`, the backward of a custom op that reads data, runs on real tensors."""
    _library.impl("custom_backward", run, "CompositeExplicitAutograd")


def eager_dropout(input: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
    """`aten.dropout` as eager PyTorch computes it, step by step."""
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    if input.device.type != "cpu":
        return torch.native_dropout(input, p, train)[0]
    mask = torch.ops.remat.dropout_mask(input.shape, torch.empty_like(input).stride(), p, device=input.device)
    return torch.ops.remat.dropout(input, mask, p)
