"""The classic experiments on one device: every way to train at each batch, predicted, measured, and published.

A `Bench` is what `remat bench` makes and what its tables and pictures read. A step is a forward and a backward pass.
*Saved* is a share of what the plain step needs: of its whole peak, or of its activation memory, which is all that the
peak holds beyond parameters, buffers and inputs (gradients count as activations: nothing is claimed for them).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from remat.core.document import write_document
from remat.core.results.pareto import Pareto

FORMAT, VERSION = "remat-bench", 1
LIMITS = (0.20, 0.25, 0.30)
"""Time over the plain step, as shares: where published figures lie."""


class Way(StrEnum):
    """How a model is trained, in the order in which tables list them."""

    PLAIN = "plain"
    PER_BLOCK = "per-block checkpoint"
    SQRT_N = "sqrt_n"
    MU_TWO = "mu_two"
    OPTIMAL = "optimal"


@dataclass(frozen=True, slots=True)
class Figures:
    """What a step needs, and its time over the plain step's as a share."""

    peak_bytes: int
    overhead: float


@dataclass(frozen=True, slots=True)
class BenchTrial:
    """One way to train, really run in turns with the plain step."""

    way: Way
    limit: float | None
    """The predicted overhead that was allowed; None for what has no choice."""
    budget_bytes: int | None
    """What the schedule was made for; None for what knows no budget."""
    predicted: Figures
    measured: Figures
    seconds: float
    """Measured time of a step, whatever else the machine did then."""
    gap: float | None = None
    """Of what is optimal: how far the fastest schedule can be away, as a share of its time."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """What the predicted peak is made of, largest first."""

    way: Way
    limit: float | None
    bytes_by_class: dict[str, int]


@dataclass(frozen=True, slots=True)
class Case:
    """One model at one batch."""

    batch: int
    resident_bytes: int
    """Parameters, buffers and inputs: there whatever the schedule."""
    plain_seconds: float
    """Predicted: the time of the plain step's ops."""
    trials: tuple[BenchTrial, ...]

    @property
    def plain(self) -> BenchTrial:
        return next(trial for trial in self.trials if trial.way is Way.PLAIN)

    def at(self, limit: float) -> tuple[BenchTrial, ...]:
        """Every way once: those that have a choice as they are at `limit`."""
        return tuple(trial for trial in self.trials if trial.limit in (None, limit))

    def step_seconds(self, trial: BenchTrial) -> float:
        """The plain step's time and what ran in turns with it took longer: comparable, also on a busy machine."""
        return trial.seconds if trial.way is Way.PLAIN else self.plain.seconds * (1 + trial.measured.overhead)

    def saved(self, trial: BenchTrial) -> Savings:
        plain = self.plain
        return Savings(
            _share(trial.predicted.peak_bytes, plain.predicted.peak_bytes),
            _share(trial.measured.peak_bytes, plain.measured.peak_bytes),
            _share(trial.predicted.peak_bytes, plain.predicted.peak_bytes, self.resident_bytes),
            _share(trial.measured.peak_bytes, plain.measured.peak_bytes, self.resident_bytes),
        )


@dataclass(frozen=True, slots=True)
class Savings:
    """Shares of the plain step's whole peak and of its activation memory."""

    peak_predicted: float
    peak_measured: float
    activations_predicted: float
    activations_measured: float


@dataclass(frozen=True, slots=True)
class Published:
    """What others report: savings from `low` to `high` at overheads from the first to the last of `LIMITS`."""

    kind: str
    low: float
    high: float


RESNET = Published("ResNet", 0.45, 0.60)
TRANSFORMER = Published("transformer", 0.50, 0.70)
PUBLISHED = {
    "resnet18": RESNET,
    "resnet50": RESNET,
    "gpt": TRANSFORMER,
    "bert": TRANSFORMER,
    "vit": TRANSFORMER,
}


@dataclass(frozen=True, slots=True)
class Experiment:
    """One model: its batches, smallest first; curve and breakdowns are those of the largest."""

    model: str
    sizes: dict[str, float]
    precision: str
    cases: tuple[Case, ...]
    curve: Pareto | None = None
    breakdowns: tuple[Breakdown, ...] = ()

    @property
    def largest(self) -> Case:
        return self.cases[-1]

    @property
    def published(self) -> Published | None:
        return PUBLISHED.get(self.model)

    def beats_published(self, *, measured: bool) -> bool | None:
        """More than the least that is published at the smallest limit, and more than the most at the largest.

        Measured, the step must also have kept to the limits. None where a trial is missing or nothing is published.
        """
        ours = [self._optimal(limit) for limit in (LIMITS[0], LIMITS[-1])]
        published = self.published
        if published is None or None in ours:
            return None
        wanted = (published.low, published.high)
        return all(
            self._reaches(trial, share, measured=measured) for trial, share in zip(ours, wanted, strict=True) if trial
        )

    def _reaches(self, trial: BenchTrial, share: float, *, measured: bool) -> bool:
        saved = self.largest.saved(trial)
        if not measured:
            return saved.peak_predicted > share
        return saved.peak_measured > share and trial.measured.overhead <= (trial.limit or 0.0)

    def _optimal(self, limit: float) -> BenchTrial | None:
        found = (trial for trial in self.largest.trials if trial.way is Way.OPTIMAL and trial.limit == limit)
        return next(found, None)


@dataclass(frozen=True, slots=True)
class Bench:
    device: str
    torch_version: str
    seed: int
    experiments: tuple[Experiment, ...]
    skipped: tuple[str, ...] = ()
    """Sentences: what did not run, and why."""


def encode_bench(bench: Bench) -> dict[str, object]:
    """The fields of the file, which `--json` prints too: what was found, and the shares that follow from it."""
    return {"format": FORMAT, "version": VERSION, **asdict(bench), "summary": list(_summary(bench))}


def save_bench(bench: Bench, path: Path) -> None:
    write_document(path, encode_bench(bench))


def _summary(bench: Bench) -> Iterator[dict[str, object]]:
    for experiment in bench.experiments:
        published = experiment.published
        yield {
            "model": experiment.model,
            "batch": experiment.largest.batch,
            "published": None if published is None else asdict(published),
            "saved": [
                {"way": trial.way, "limit": trial.limit, **asdict(experiment.largest.saved(trial))}
                for trial in experiment.largest.trials
            ],
            "beats_published_predicted": experiment.beats_published(measured=False),
            "beats_published_measured": experiment.beats_published(measured=True),
        }


def _share(peak_bytes: int, plain_bytes: int, resident_bytes: int = 0) -> float:
    return 1 - (peak_bytes - resident_bytes) / max(1, plain_bytes - resident_bytes)
