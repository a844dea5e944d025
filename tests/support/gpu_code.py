"""Models trained one step by Inductor's code for a GPU, which Triton's interpreter runs; for a process of its own.

    python -m tests.support.gpu_code MODEL:TYPE:SHARE ...

Prints for each, as a line of JSON, how far gradients are from plain PyTorch's, whether they have the bits that code has
which writes over nothing but as Inductor would, how many kernels of both write over something, and the peaks of both.
TYPE is float32 or bfloat16, which autocasts.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"

import torch
from benchmarks import as_gpu
from benchmarks.bench_compiled import Conditions, between, compiler, rates_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from remat.core.devices import find_device
from remat.inductor import compile as compiling
from remat.inductor.dry_run.compiled import Compiled
from remat.inductor.dry_run.run import dry_run
from remat.inductor.joining import rooms_of
from remat.inductor.model.choose import Choice, choose
from remat.inductor.partition import Cut, Uncut


class Capped(nn.Module):
    """A decoder's end: gated layers and logits that are capped, over the words that are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.gates = nn.ModuleList(nn.Linear(32, 96, bias=False) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(48, 32, bias=False) for _ in range(2))
        self.head = nn.Linear(32, 512, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for norm, gate, down in zip(self.norms, self.gates, self.downs, strict=True):
            one, other = gate(norm(x)).chunk(2, -1)
            x = x + down(functional.gelu(one, approximate="tanh") * other)
        logits = torch.tanh(self.head(x) / 30) * 30
        return functional.cross_entropy(logits.float().view(-1, 512), labels.view(-1))


class Mobile(nn.Module):
    """Inverted residuals with `activation`, and squeeze and excite where asked."""

    def __init__(self, activation: Callable[[Tensor], Tensor], *, excites: bool) -> None:
        super().__init__()
        self.activation, self.excites = activation, excites
        self.stem = nn.Conv2d(3, 8, 3, stride=2, bias=False)
        self.widen = nn.ModuleList(nn.Conv2d(8, 24, 1, bias=False) for _ in range(3))
        self.deep = nn.ModuleList(nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False) for _ in range(3))
        self.narrow = nn.ModuleList(nn.Conv2d(24, 8, 1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(24 if index % 3 else 8) for index in range(9))
        self.squeeze = nn.ModuleList(nn.Conv2d(24, 6, 1) for _ in range(3))
        self.excite = nn.ModuleList(nn.Conv2d(6, 24, 1) for _ in range(3))
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.activation(self.stem(functional.pad(images, (0, 1, 0, 1))))
        for index in range(3):
            last, first, second = (self.norms[3 * index + offset] for offset in range(3))
            y = self.activation(first(self.widen[index](x)))
            y = self.activation(second(self.deep[index](y)))
            if self.excites:
                y = y * torch.sigmoid(self.excite[index](self.activation(self.squeeze[index](y.mean((2, 3), True)))))
            x = x + last(self.narrow[index](y))
        return functional.cross_entropy(self.head(x.mean((2, 3))).float(), labels)


class Scaled(nn.Module):
    """Five tensors are read for a chain whose middle is read twice: Inductor computes it once, in a wider type."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        self.vectors = nn.ParameterList(torch.rand(4, 64) for _ in range(4))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        for layer, (first, second, third, fourth) in zip(self.layers, self.vectors, strict=True):
            y = (layer(x).float() * first + second) * third + fourth
            x = y * torch.sigmoid(y)
        return (x * x + shift).mean()


class Normed(nn.Module):
    """Residual blocks whose normalized rows several matmuls read, again and again under a lean plan."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(12))
        self.ups = nn.ModuleList(nn.Linear(64, 192) for _ in range(12))
        self.downs = nn.ModuleList(nn.Linear(192, 64) for _ in range(12))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(functional.gelu(up(norm(x))))
        return functional.mse_loss(x, y)


class Shifted(nn.Module):
    """Values that are read where they are not written: flipped, shifted, transposed and broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for layer in self.layers:
            y = torch.sigmoid(layer(x)) * scale
            z = torch.tanh(y.flip(0) + y.roll(1, 1)).to(torch.bfloat16).float()
            x = (z * y.transpose(0, 1)).sin() + y.mean(0, keepdim=True) + functional.hardtanh(y * 7, -1, 1)
        return (x * x).sum()


def example(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    if name == "capped":
        tokens = torch.randint(512, (4, 32))
        return Capped(), (tokens, tokens)
    if name in ("mobile", "excited"):
        net = Mobile(functional.silu, excites=True) if name == "excited" else Mobile(functional.relu6, excites=False)
        return net, (torch.randn(4, 3, 33, 33), torch.randint(10, (4,)))
    if name == "normed":
        return Normed(), (torch.randn(1024, 64), torch.randn(1024, 64))
    if name == "scaled":
        return Scaled(), (torch.randn(128, 64), torch.rand(64))
    return Shifted(), (torch.randn(64, 64), torch.rand(64, 1))


def gradients(model: nn.Module, call: Any, inputs: tuple[Tensor, ...], *, casts: bool) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        loss = call(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def planned(
    model: nn.Module, inputs: tuple[Tensor, ...], share: float, *, casts: bool
) -> tuple[list[Tensor], list[Compiled], Choice]:
    """A step in `share` of the way from what the leanest plan needs to what the fastest does."""
    conditions = Conditions(find_device("h200"), FakeTensorMode(), for_gpu=True, seed=None)
    found: list[Compiled] = []
    choices: list[Choice] = []

    def decide(uncut: Uncut) -> Cut:
        rates = rates_of(uncut, conditions)
        budget = between(uncut.joint, rates, share)
        choices.append(choose(uncut.joint, rates, budget))
        return Cut(choices[-1].saved, choices[-1].unrolled, rooms_of(uncut.joint, choices[-1], budget))

    torch._dynamo.reset()
    backend = compiler(decide, found, for_gpu=True, is_planned=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    # Nothing is held for a later tensor: all that these models make is small.
    with patch.dict(compiling.HELD_BYTES, cuda=0):
        return gradients(model, compiled, inputs, casts=casts), found, choices[-1]


@contextlib.contextmanager
def written_over_as_inductor_would() -> Iterator[None]:
    with patch.object(compiling, "writing_over_what_ends", contextlib.nullcontext):
        yield


def figures(name: str, dtype: str, share: float) -> dict[str, Any]:
    model, inputs = example(name)
    casts = dtype == "bfloat16"
    plain = gradients(model, model, inputs, casts=casts)
    ours, found, choice = planned(model, inputs, share, casts=casts)
    with written_over_as_inductor_would():
        theirs, found_theirs, _ = planned(model, inputs, share, casts=casts)
    return {
        "has_equal_bits": all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)),
        "apart": max(distance(one, other) for one, other in zip(ours, plain, strict=True)),
        "written_over": sum(half.source.count("mutated_arg_names': ['") for half in found),
        "written_over_by_inductor": sum(half.source.count("mutated_arg_names': ['") for half in found_theirs),
        "peak_bytes": peak_of(found),
        "peak_of_inductor_bytes": peak_of(found_theirs),
        "predicted_bytes": choice.prediction.peak_bytes,
    }


def distance(one: Tensor, other: Tensor) -> float:
    """Relative to its size; gradients that would be zero without rounding have none."""
    return float((one - other).norm() / other.norm().clamp(min=1e-2))


def peak_of(found: list[Compiled]) -> int:
    forward, backward = sorted(found, key=lambda half: half.is_backward)
    return dry_run(forward, backward, device=torch.device("cpu")).peak_bytes


if __name__ == "__main__":
    as_gpu.take_cpu_for_gpu()
    from benchmarks.interpreted import interpret_kernels

    interpret_kernels()
    for asked in sys.argv[1:]:
        name, dtype, share = asked.split(":")
        print(json.dumps(figures(name, dtype, float(share))))
