"""From a seed, a `Case`: a module made of a few blocks, its inputs, and how it is trained.

A case is plain data: it prints as a few lines, can be changed by `dataclasses.replace`, and builds the same module and
the same inputs every time it is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any

import torch
from tests.fuzz.blocks import BLOCKS
from tests.fuzz.heads import HEADS, choose_reduction
from tests.fuzz.parts import Layout, Sizes
from torch import nn

WORDS = 40
"""Different integers that come in where the module begins with an embedding."""


class Entry(Enum):
    """What comes in."""

    PLAIN = "plain"
    TRANSPOSED = "a transposed view"
    STRIDED = "every second element"
    EXPANDED = "one row, expanded"
    LEAF = "requires gradients"
    INTEGERS = "integers"


class Returns(Enum):
    """What the module returns beside its loss, or its features where the loss is computed outside."""

    NOTHING = "nothing"
    FEATURES = "features"
    VIEW = "a view of the features"
    DETACHED = "detached features"
    CHANGED = "views of features changed in place"
    TWICE = "the features twice"
    MIDDLE = "a dict with the middle"


class Backward(Enum):
    """How gradients are asked for."""

    ONCE = "one backward"
    RETAINED = "the same backward twice"
    TWO_LOSSES = "two losses one after the other"
    TOGETHER = "two losses in one backward"
    TWO_CALLS = "two calls and one backward"
    FUNCTIONAL = "torch.autograd.grad"


class Form(Enum):
    """What is optimized."""

    MODULE = "the module"
    FUNCTION = "a function that returns the loss"
    STEP = "a function that also calls backward"


class Update(Enum):
    SGD = "SGD"
    MOMENTUM = "SGD with momentum"
    ADAMW = "AdamW"


@dataclass(frozen=True, slots=True)
class Case:
    """All there is to know about one module and its training."""

    seed: int
    sizes: Sizes
    blocks: tuple[tuple[str, int], ...]
    """Name and seed of each."""
    head: str = "square"
    reduction: str = "mean"
    entry: Entry = Entry.PLAIN
    is_image: bool = False
    loss_inside: bool = True
    returns: Returns = Returns.NOTHING
    backward: Backward = Backward.ONCE
    form: Form = Form.MODULE
    update: Update = Update.SGD
    micro_batches: int = 1
    drops_gradients: bool = True
    """Whether gradients are set to None between steps, and not to zero."""
    autocast: bool = False

    def describe(self) -> str:
        """One line."""
        sizes = f"{self.sizes.batch}x{self.sizes.time}x{self.sizes.width}"
        loss = f"{self.head} ({self.reduction}) {'inside' if self.loss_inside else 'outside'}"
        odd = [
            f"input {self.entry.value}" if self.entry is not Entry.PLAIN else "",
            "image" if self.is_image else "",
            f"returns {self.returns.value}" if self.returns is not Returns.NOTHING else "",
            self.backward.value if self.backward is not Backward.ONCE else "",
            f"optimizes {self.form.value}" if self.form is not Form.MODULE else "",
            self.update.value if self.update is not Update.SGD else "",
            f"{self.micro_batches} micro-batches" if self.micro_batches > 1 else "",
            "" if self.drops_gradients else "gradients zeroed",
            "autocast" if self.autocast else "",
        ]
        chain = " > ".join(name if not seed else f"{name}#{seed}" for name, seed in self.blocks)
        return "; ".join([f"{sizes}: {chain} > {loss}", *filter(None, odd)])

    def starts_with_gradients(self) -> bool:
        """Whether there are steps that add to gradients of an earlier backward."""
        return self.micro_batches > 1 or not self.drops_gradients

    def build(self) -> Chain:
        """The module, with the same weights each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return Chain(self)

    def inputs(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What goes in and the target, for the `number`th call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * self.seed + number)
            layout = Layout.IMAGE if self.is_image else Layout.SEQUENCE
            shape = self.sizes.shape(layout)
            batch, time, width = self.sizes.shape(Layout.SEQUENCE)
            return _enter(self.entry, shape), HEADS[self.head].target((batch, time, width))


def make_case(seed: int, *, on_cuda: bool = False) -> Case:
    """The case of this seed."""
    choose = Random(seed)
    batch = 8 if choose.random() < 0.6 else choose.choice((4, 6, 12, 1, 1, 2, 0))
    sizes = Sizes(batch, choose.choice((5, 6, 7, 8)), choose.choice((24, 32, 32, 48)))
    names = sorted(name for name, kind in BLOCKS.items() if not (on_cuda and kind.on_cpu_only))
    count = choose.choice((1, 1, 2, 2, 2, 3, 3, 4, 6))
    blocks = tuple((choose.choice(names), choose.randrange(1, 1000)) for _ in range(count))
    entry = _weighted(choose, Entry, 6)
    is_image = choose.random() < 0.25 and entry is not Entry.INTEGERS
    is_sparse = any("sparse" in name for name, _ in blocks)
    return Case(
        seed=seed,
        sizes=sizes,
        blocks=blocks,
        head=choose.choice(sorted(HEADS)),
        reduction=choose_reduction(choose),
        entry=entry,
        is_image=is_image,
        loss_inside=choose.random() < 0.6,
        returns=_weighted(choose, Returns, 8),
        backward=_weighted(choose, Backward, 14),
        form=_weighted(choose, Form, 12),
        update=Update.SGD if is_sparse else choose.choice(list(Update)),
        micro_batches=2 if choose.random() < 0.15 else 1,
        drops_gradients=is_sparse or choose.random() < 0.9,
        autocast=choose.random() < 0.08,
    )


def _weighted(choose: Random, options: type[Enum], plain: int) -> Any:
    """The first option `plain` times as often as each other one."""
    first, *others = options
    return choose.choice([first] * plain + others)


class Chain(nn.Module):
    """The blocks one after another, with the changes of layout that they need, and what the case returns."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        width = case.sizes.width
        self.words = nn.Embedding(WORDS, width) if case.entry is Entry.INTEGERS else None
        self.first = nn.Linear(width, width) if case.seed % 2 else nn.Identity()
        kinds = [BLOCKS[name] for name, _ in case.blocks]
        self.layouts = [kind.layout for kind in kinds]
        self.parts = nn.ModuleList(
            kind.make(Random(seed), case.sizes) for kind, (_, seed) in zip(kinds, case.blocks, strict=True)
        )
        self.last = nn.Linear(width, width)
        self.loss = HEADS[case.head].loss(case.reduction)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        features, middle = self.features(x)
        if self.case.loss_inside:
            return self.returned(self.loss(features.float(), target), features, middle)
        return self.returned(features, features, middle)

    def features(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features as `[batch, time, width]`, and what the first half of the blocks made."""
        side = self.case.sizes.side
        layout = Layout.IMAGE if self.case.is_image else Layout.SEQUENCE
        if self.words is not None:
            x = self.words(x)
        if layout is Layout.SEQUENCE:
            x = self.first(x)
        middle = x
        for number, (wanted, part) in enumerate(zip(self.layouts, self.parts, strict=True)):
            x, layout = _adapt(x, layout, wanted, side)
            x = part(x)
            if 2 * number < len(self.parts):
                middle = x
        x, _ = _adapt(x, layout, Layout.SEQUENCE, side)
        return self.last(x), middle

    def returned(self, result: torch.Tensor, features: torch.Tensor, middle: torch.Tensor) -> Any:
        kind = self.case.returns
        if kind is Returns.FEATURES:
            return result, features
        if kind is Returns.VIEW:
            return result, features.transpose(1, 2)
        if kind is Returns.DETACHED:
            return result, features.detach()
        if kind is Returns.CHANGED:
            changed = (features * 2).add_(1.0)
            return result, changed.view(-1), changed.detach()
        if kind is Returns.TWICE:
            return result, features, features
        if kind is Returns.MIDDLE:
            return {"result": result, "middle": middle}
        return result


def _adapt(x: torch.Tensor, layout: Layout, wanted: Layout, side: int) -> tuple[torch.Tensor, Layout]:
    """The same numbers in the layout wanted, as a view."""
    if wanted in (layout, Layout.ANY):
        return x, layout
    if wanted is Layout.IMAGE:
        return x.transpose(1, 2).unflatten(2, (side, side)), wanted
    return x.flatten(2).transpose(1, 2), wanted


def _enter(entry: Entry, shape: tuple[int, ...]) -> torch.Tensor:
    if entry is Entry.INTEGERS:
        return torch.randint(WORDS, shape[:2])
    if entry is Entry.TRANSPOSED:
        return torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if entry is Entry.STRIDED:
        return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    if entry is Entry.EXPANDED:
        return torch.randn(shape[0], 1, *shape[2:]).expand(shape)
    return torch.randn(shape, requires_grad=entry is Entry.LEAF)
