"""The peak of the step in plain eager PyTorch, found without running it: what "1x" means.

In: the graph Dynamo captured, which is the user's forward as eager would run it (in-place ops and all). It runs on
fake tensors, forward and backward, while every storage is followed from birth to death; no memory is used. What kernels
work in is measured for the very calls that eager makes. Where the user's code takes another path under tracing,
`eager_step.py` runs that code itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from remat.pytorch._compat.distributed import wrapping_tensors
from remat.pytorch._compat.fakes import FakeTensorMode, answer_as, on_storage
from remat.pytorch._compat.numbers import when_traced
from remat.pytorch._compat.symbols import Amount, Sizes, Symbols, is_open, layout_at, storage_amount
from remat.pytorch._compat.tensors import storage_address, with_inner_tensors
from remat.pytorch._compat.trees import tree_leaves
from remat.pytorch.costs.calls import Calls
from remat.pytorch.costs.op_costs import costs_of
from remat.pytorch.costs.plain_watch import PlainOp, StorageWatch
from remat.pytorch.reach import is_used_up

MOST_WORKSPACE = 32
"""How many times what an op reads and writes its workspace may be: sets which ops could lift the peak."""


@dataclass(frozen=True, slots=True)
class PlainStep:
    """Bytes of a plain eager step, inputs and parameters included."""

    ops: tuple[PlainOp, ...]
    resident_bytes: int
    held_bytes: int
    """In memory between forward and backward."""
    device: torch.device = torch.device("cpu")
    calls: Calls = field(default_factory=Calls, compare=False)
    whole: PlainStep | None = None
    """Of the whole call, where this is one of the graphs that it breaks into."""
    output_bytes: int = 0
    """Of what is in memory while backward runs, what only the caller's hold on outputs keeps there."""
    forward_ops: int = 0
    """How many of `ops` run before backward."""
    assumes: bool = False
    """Whether it was followed with numbers that were made up: it may have gone another way than the real one."""

    @property
    def live_peak_bytes(self) -> int:
        """Without what kernels work in."""
        return max((op.live_bytes for op in self.ops), default=self.resident_bytes)

    def workspace_bytes(self, *, everywhere: bool = False) -> list[int]:
        """What the kernel of each op works in: of those that could lift the peak, or `everywhere`."""
        peak = 0 if everywhere else self.live_peak_bytes
        keys = [op.key if op.live_bytes + MOST_WORKSPACE * op.touched_bytes >= peak else "" for op in self.ops]
        known = costs_of(self.calls.nodes(key for key in keys if key), self.device) if any(keys) else {}
        return [known[key].workspace_bytes if key else 0 for key in keys]

    def ops_by_key(self) -> Iterator[tuple[str, int]]:
        """Each op as what it is called with and the bytes that it reads and writes."""
        return ((op.key, op.touched_bytes) for op in self.ops)

    def peak_bytes(self, dropped_bytes: int = 0) -> int:
        """The peak; calls that were never measured are, and are kept in the cost cache.

        `dropped_bytes` is how much of its outputs the caller drops before backward.
        """
        needs = [op.live_bytes + need for op, need in zip(self.ops, self.workspace_bytes(), strict=True)]
        gone, split = min(dropped_bytes, self.output_bytes), self.forward_ops
        return max((*needs[:split], *(need - gone for need in needs[split:])), default=self.resident_bytes)


def plain_step(module: GraphModule, inputs: Sequence[Any], device: torch.device) -> PlainStep:
    """Run `module` forward and backward on fake copies of `inputs` and watch."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.enable_grad():
        fakes = _fake_inputs(inputs)
        use_up(zip(inputs, fakes, strict=True))
        watch = StorageWatch(device)
        for fake in fakes:
            if isinstance(fake, torch.Tensor):
                watch.see(fake)
        resident = watch.current
        with watch:
            outputs = [module(*fakes)]
            # Autocast's region ends before backward, and with it the casts that it keeps.
            torch.clear_autocast_cache()
            root = _root(outputs[0])
            held, forward_ops = watch.current, watch.count
            outputs.clear()
            kept = held - watch.current
            _go_back(root, watch)
    ops = watch.finished()
    backward = (replace(op, live_bytes=op.live_bytes + kept) for op in ops[forward_ops:])
    every = (*ops[:forward_ops], *backward)
    return PlainStep(every, resident, held, device, watch.calls, output_bytes=kept, forward_ops=forward_ops)


def inputs_at(inputs: Sequence[Any], traced: Sequence[Any], symbols: Symbols, sizes: Sizes) -> list[Any]:
    """Stand-ins for `inputs`, which were `traced` with sizes left open, at certain sizes."""

    def amount(expression: Amount) -> int:
        return symbols.amount(expression, sizes)

    found: list[Any] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        for item, value in zip(inputs, traced, strict=True):
            if isinstance(value, torch.SymInt):
                item = symbols.number(value, sizes)
            elif isinstance(item, torch.Tensor) and is_open(value):
                storage = torch.empty(amount(storage_amount(value)), dtype=torch.uint8, device=item.device)
                fake = on_storage(storage.untyped_storage(), value, item.device, layout_at(value, amount))
                item = fake.requires_grad_(item.requires_grad)
            found.append(item)
    return found


def use_up(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Drop the gradients of fake leaves where an optimizer inside backward uses up those of the real ones."""
    for real, fake in pairs:
        if is_used_up(real):
            fake.register_post_accumulate_grad_hook(_drop_gradient)


def _drop_gradient(leaf: torch.Tensor) -> None:
    leaf.grad = None


def go_back(outputs: Any, watch: StorageWatch) -> int:
    """Run the backward of `outputs`, which the caller holds, as a user would; what was in memory before it."""
    # Autocast's region ends before backward, and with it the casts that it keeps.
    torch.clear_autocast_cache()
    held = watch.current
    _go_back(_root(outputs), watch)
    return held


def _root(outputs: Any) -> torch.Tensor | None:
    """What to call backward on, which holds no output."""
    roots = loss_like([leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)])
    root: torch.Tensor | None = _LossOutside.apply(*roots) if roots else None
    return root


def _go_back(root: torch.Tensor | None, watch: StorageWatch) -> None:
    if root is not None:
        with torch.autocast(watch.device.type, enabled=False):
            root.backward(root.detach())


class _LossOutside(torch.autograd.Function):
    """Code of the caller, whose backward makes a gradient for each output that autograd alone holds."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.layouts = [(item.shape, item.stride(), item.dtype, item.device) for item in outputs]
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        made = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype, device in ctx.layouts
        ]
        # That of a loss is held by `loss.backward()` itself.
        ctx.held = [item for item in made if item.numel() == 1]
        return tuple(made)


def loss_like(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a user would call backward on: the scalars if there are any, otherwise everything differentiable."""
    differentiable = [output for output in outputs if output.requires_grad]
    scalars = [output for output in differentiable if output.numel() == 1]
    return scalars or differentiable


def _fake_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Tensors of the same shapes; those that shared a storage share one again."""
    storages: dict[int, torch.UntypedStorage] = {}
    return [_fake_like(item, storages) if isinstance(item, torch.Tensor) else when_traced(item) for item in inputs]


def _fake_like(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    if isinstance(tensor, wrapping_tensors()):
        with torch.no_grad():
            # What requires gradients is the whole, not its part here.
            made = with_inner_tensors(tensor, lambda part: _fake_like(part, storages))
        return made.requires_grad_(tensor.requires_grad)
    with torch.no_grad():
        address = storage_address(tensor)
        if address not in storages:
            size = tensor.untyped_storage().nbytes()
            flat = torch.empty(size, dtype=torch.uint8, device=tensor.device)
            storages[address] = flat.untyped_storage()
        fake = on_storage(storages[address], tensor, tensor.device)
    if tensor.dim() == 0 and tensor.device.type == "cpu" and not tensor.requires_grad:
        # Dynamo hands a number that changes in a tensor, and asks that for it.
        answer_as(tensor, fake)
    if tensor.is_leaf or not tensor.requires_grad:
        return fake.requires_grad_(tensor.requires_grad)
    gradients: list[torch.Tensor] = []
    computed: Any = _ComputedBefore.apply(torch.ones((), requires_grad=True), lambda: fake, gradients)
    computed.remat_gradients = gradients
    return computed


class _ComputedBefore(torch.autograd.Function):
    """An input that an earlier graph has computed: no leaf, so that the step may change it in place.

    Its gradient stays, as that of a leaf does.
    """

    @staticmethod
    def forward(ctx: Any, flag: torch.Tensor, get: Callable[[], torch.Tensor], gradients: list[torch.Tensor]) -> Any:
        ctx.gradients = gradients
        return get()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.gradients.append(grad)
        return None, None, None
