"""Which models the experiments run, at which sizes, and how long is looked for schedules.

In: a device and whether it should be quick. Out: a `Suite`. On CUDA the models have the sizes that papers train:
ResNet-50 on photographs of 224 pixels, and GPT-2 medium on 1024 tokens, both in bf16. On a CPU they are narrower and
shorter, so that a step takes about a second on two cores; activations dominate the memory of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from remat.errors import UnknownName
from remat.zoo import REGISTRY

MODELS = ("resnet50", "gpt")

Sizes = dict[str, tuple[dict[str, float], tuple[int, ...]]]
"""Sizes and batches by model."""


@dataclass(frozen=True, slots=True)
class Subjects:
    """One model and its batches."""

    model: str
    sizes: dict[str, float]
    batches: tuple[int, ...]
    precision: str
    """fp32, or what autocast computes in: bf16."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is tried."""

    points: int
    """Budgets on the curve of the largest batch."""
    rounds: int
    """Budgets that are tried beyond the curve for each limit."""
    time_limit_s: float
    """For each budget."""
    pairs: int
    """Timed steps of each way to train, each beside a plain one."""


@dataclass(frozen=True, slots=True)
class Suite:
    subjects: tuple[Subjects, ...]
    effort: Effort

    def tasks(self) -> list[tuple[Subjects, int]]:
        """Every model at its largest batch, then every one at its next: what is cut short has the most telling part."""
        ranked = [
            (rank, number, batch)
            for number, subjects in enumerate(self.subjects)
            for rank, batch in enumerate(sorted(subjects.batches, reverse=True))
        ]
        return [(self.subjects[number], batch) for _, number, batch in sorted(ranked)]


_CPU: Sizes = {
    "resnet50": (dict(side=48, shrink=1, width=16, classes=100), (4, 8, 16)),
    "gpt": (dict(length=128, vocabulary=512, width=256, depth=12, heads=4), (4, 8, 16)),
}
_CUDA: Sizes = {
    "resnet50": (dict(side=224, shrink=4, width=64, classes=1000), (64, 128, 256)),
    "gpt": (dict(length=1024, vocabulary=50257, width=1024, depth=24, heads=16), (4, 8, 16)),
}
_OTHER_BATCHES = (4, 8, 16)
_QUICK_SHARE = 4
"""A quick run has the two largest batches, divided by this."""
EFFORT = Effort(points=8, rounds=3, time_limit_s=3.0, pairs=3)
CUDA_EFFORT = Effort(points=5, rounds=2, time_limit_s=2.0, pairs=3)
"""Devices are lent by the minute, and the graphs are larger: less search."""
QUICK = Effort(points=5, rounds=2, time_limit_s=1.0, pairs=2)


def make_suite(models: Sequence[str], batches: Sequence[int], device: str, *, quick: bool) -> Suite:
    """The experiments on `models`; without `batches`, at those that suit the device."""
    unknown = [model for model in models if model not in REGISTRY]
    if unknown or not models:
        asked = repr(unknown[0]) if unknown else "''"
        raise UnknownName(f"No model is called {asked}; the zoo has {', '.join(REGISTRY)}.")
    found = (_subjects(model, device, quick) for model in dict.fromkeys(models))
    chosen = tuple(replace(item, batches=tuple(sorted(set(batches)))) if batches else item for item in found)
    return Suite(chosen, QUICK if quick else CUDA_EFFORT if device.startswith("cuda") else EFFORT)


def _subjects(model: str, device: str, quick: bool) -> Subjects:
    on_cuda = device.startswith("cuda")
    sizes, batches = (_CUDA if on_cuda else _CPU).get(model, ({}, _OTHER_BATCHES))
    if quick:
        batches = tuple(max(2, batch // _QUICK_SHARE) for batch in batches[-2:])
    return Subjects(model, dict(sizes), batches, "bf16" if on_cuda else "fp32")
