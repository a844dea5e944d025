"""The classic experiments as tables: every way to train at each batch, savings beside published ones, breakdowns.

In: a `Bench`. Out: `Sheet`s, for a terminal or a Markdown file, and a sentence for each model.
"""

from __future__ import annotations

from collections.abc import Iterator

from remat.core.budget import format_bytes
from remat.core.results.bench import LIMITS, Bench, BenchTrial, Breakdown, Case, Experiment, Published, Way
from remat.report.tables.sheet import Sheet
from remat.report.tables.text import gap_share

_NOTHING = "–"
DOUBTFUL_RATIO = 1.3
"""Ops that together take more than this times the step they make up were measured badly."""
SAVED_NOTE = (
    "Saved, of peak: share of all the memory that the plain step needs at its peak (parameters, gradients, inputs and "
    "activations). Of activations: the same without parameters, buffers and inputs. Overhead: time over the plain step."
)


def bench_sheets(bench: Bench) -> Iterator[Sheet]:
    """For each model: all batches, the comparison with published figures, and what the peak is made of."""
    for experiment in bench.experiments:
        yield _batches(experiment, bench.device)
        yield _savings(experiment)
        if experiment.breakdowns:
            yield _breakdowns(experiment)


def bench_markdown(bench: Bench) -> str:
    title = f"# The classic experiments on {bench.device}, torch {bench.torch_version}"
    words = remarks(bench)
    tables = [sheet.as_markdown() for sheet in bench_sheets(bench)]
    return "\n".join([title, "", *(f"- {sentence}" for sentence in words), "", *tables])


def remarks(bench: Bench) -> list[str]:
    """Everything that is said in words: verdicts, doubts, and what did not run."""
    return [*verdicts(bench), *doubts(bench), *bench.skipped]


def doubts(bench: Bench) -> list[str]:
    """Where the ops together took longer than the whole step, something else was running while they were measured."""
    return [
        f"{experiment.model}, batch {case.batch}: its ops were measured at {case.plain_seconds:.3g} s together, "
        f"its plain step at {case.plain.seconds:.3g} s; the machine was busy, and predicted overheads cannot be "
        "trusted: run again."
        for experiment in bench.experiments
        for case in experiment.cases
        if case.plain_seconds > DOUBTFUL_RATIO * case.plain.seconds
    ]


def verdicts(bench: Bench) -> list[str]:
    """One sentence for each model that figures are published for."""
    return [sentence for experiment in bench.experiments if (sentence := _verdict(experiment))]


def label(trial: BenchTrial | Breakdown) -> str:
    """`optimal ≤ 20%`: the way and the overhead that it was allowed."""
    return trial.way if trial.limit is None else f"{trial.way} ≤ {trial.limit:.0%}"


def _batches(experiment: Experiment, device: str) -> Sheet:
    columns = ("way", "batch", "predicted peak", "peak", "saved", "step", "predicted", "overhead", "gap")
    rows = [_batch_row(case, trial) for case in experiment.cases for trial in case.at(LIMITS[0])]
    note = "Measured where nothing else is said; saved is of the peak; plain's own overhead is what noise does."
    return Sheet(f"{experiment.model} on {device}, {experiment.precision}: every batch", columns, tuple(rows), note)


def _batch_row(case: Case, trial: BenchTrial) -> tuple[str, ...]:
    return (
        label(trial),
        str(case.batch),
        format_bytes(trial.predicted.peak_bytes),
        format_bytes(trial.measured.peak_bytes),
        _saved(trial, case.saved(trial).peak_measured),
        f"{case.step_seconds(trial) * 1e3:.1f} ms",
        f"{trial.predicted.overhead:+.1%}",
        f"{trial.measured.overhead:+.1%}",
        _NOTHING if trial.gap is None else gap_share(trial.gap),
    )


def _savings(experiment: Experiment) -> Sheet:
    case, published = experiment.largest, experiment.published
    rows = [_savings_row(published, case, trial) for trial in case.trials[1:]]
    if published is not None:
        span, share = _span(LIMITS[0], LIMITS[-1]), _span(published.low, published.high)
        rows.insert(0, (f"published, {published.kind}", span, share, _NOTHING, _NOTHING))
    title = f"{experiment.model}, batch {case.batch}: memory saved, predicted / measured, beside what is published"
    columns = ("way", "overhead", "saved, of peak", "saved, of activations", "published range")
    return Sheet(title, columns, tuple(rows), SAVED_NOTE)


def _savings_row(published: Published | None, case: Case, trial: BenchTrial) -> tuple[str, ...]:
    saved = case.saved(trial)
    return (
        label(trial),
        f"{trial.predicted.overhead:+.1%} / {trial.measured.overhead:+.1%}",
        f"{saved.peak_predicted:.1%} / {saved.peak_measured:.1%}",
        f"{saved.activations_predicted:.1%} / {saved.activations_measured:.1%}",
        _beside(published, case, trial),
    )


def _span(low: float, high: float) -> str:
    return f"{low:.0%} to {high:.0%}"


def _beside(published: Published | None, case: Case, trial: BenchTrial) -> str:
    if published is None:
        return _NOTHING
    saved = case.saved(trial).peak_measured
    return "below" if saved < published.low else "above" if saved > published.high else "within"


def _breakdowns(experiment: Experiment) -> Sheet:
    classes = dict.fromkeys(name for item in experiment.breakdowns for name in item.bytes_by_class)
    shown = [item for item in experiment.breakdowns if item.limit in (None, LIMITS[0], LIMITS[-1])]
    rows = [
        (label(item), format_bytes(sum(item.bytes_by_class.values())), *(_part(item, name) for name in classes))
        for item in shown
    ]
    title = f"{experiment.model}, batch {experiment.largest.batch}: what the predicted peak is made of"
    return Sheet(title, ("way", "peak", *classes), tuple(rows))


def _part(item: Breakdown, name: str) -> str:
    return format_bytes(item.bytes_by_class[name]) if name in item.bytes_by_class else _NOTHING


def _saved(trial: BenchTrial, share: float) -> str:
    return _NOTHING if trial.way is Way.PLAIN else f"{share:.1%}"


def _verdict(experiment: Experiment) -> str:
    published = experiment.published
    predicted, measured = (experiment.beats_published(measured=flag) for flag in (False, True))
    if published is None or predicted is None or measured is None:
        return ""
    claim = f"{published.low:.0%} at {LIMITS[0]:.0%} and {published.high:.0%} at {LIMITS[-1]:.0%} overhead"
    return (
        f"{experiment.model}, batch {experiment.largest.batch}: as predicted, the optimal plans {_words(predicted)} "
        f"the published savings ({claim}, of the whole peak); as measured, time included, they {_words(measured)} them."
    )


def _words(beats: bool) -> str:
    return "beat" if beats else "do not beat"
