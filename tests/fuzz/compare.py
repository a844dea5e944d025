"""A case in, a `Comparison` out: eager and three budgets, compared in bits and bytes.

Eager runs twice, to leave out cases that fail or differ by themselves. Then the step is optimized and trained from the
same state with the same seeds: outputs, gradients, parameters, buffers and generators have to be the same to the bit,
and the peak of later steps within the budget. A budget that is refused is tried again a little above the smallest one
that the refusal names.
"""

from __future__ import annotations

import gc
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from tests.fuzz import meter
from tests.fuzz.documented import documented
from tests.fuzz.modules import Case, Returns, Update
from tests.fuzz.trainer import Batches, Record, Trainer, differences, far_apart, same_bits
from torch import nn

import remat
from remat.pytorch.measure.measure_step import measure_once
from remat.pytorch.run.optimize import session_of

STEPS = 3
BUDGETS = (("1x", "0.9x", "0.75x"), ("1x", "0.8x", "0.7x"), ("1x", "0.85x", "0.65x"), ("1x", "0.8x", "0.6x"))
"""Taken in turn by one case after another."""
ABOVE_MINIMUM = 1.02
TIME_LIMIT_S = 0.3
SCALARS_BYTES = {"cpu": 64, "cuda": 8 * 512}
"""Losses that the caller adds up and what `backward` starts from, which nobody plans; CUDA has blocks of 512 bytes."""
GENERATOR_BYTES = 5056
"""The state of the CPU's generator, copied for a moment where a step draws: host data, which no budget counts."""
TOLERANCE = 2e-3
"""Of the largest element, where kernels are not eager's."""
ROUNDING = 1e-4
"""The same, where only the order of a sum may differ."""
LOW_PRECISION = 2e-2
"""The same in bfloat16."""
VARIES = "does not have a deterministic implementation"
"""What torch says of kernels that may give other bits from run to run."""
WARNINGS = (
    *("unplanned", "not planned", "beyond the", "torch.compile runs it", "runs in eager", "only estimated"),
    *("exceed the budget", "over its budget", "more than its budget"),
)
"""Parts of the sentences with which Remat says that a step is not within its plan."""


class Verdict(Enum):
    """From best to worst; those from WARNED_OVER on are worth a look, those from SILENT on are failures."""

    OK = "ok"
    REFUSED = "refused"
    WARNED = "warned unplanned"
    WARNED_OVER = "warned, over budget"
    DISCARDED = "discarded"
    SILENT = "silently unplanned"
    REFUSED_AGAIN = "refused its own minimum"
    OVER_BUDGET = "over budget"
    CRASH = "crash"
    WRONG_BITS = "wrong bits"
    TIMEOUT = "timeout"

    @property
    def rank(self) -> int:
        return list(Verdict).index(self)

    @property
    def is_failure(self) -> bool:
        return self.rank >= Verdict.SILENT.rank


@dataclass(slots=True)
class Trial:
    """One budget."""

    asked: str
    verdict: Verdict = Verdict.OK
    details: str = ""
    refused: bool = False
    budget_bytes: int = 0
    predicted_bytes: int = 0
    measured_bytes: int = 0
    """The peak of the last step by `remat.measure`."""
    metered_bytes: int = 0
    """The same by `tests.fuzz.meter`; 0 where there is none."""
    apart: list[str] = field(default_factory=list)
    """What differs, in the first step in which anything does."""
    captured_late: int = 0
    """Graphs that were captured in the last step."""
    warnings: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    """What was said of the same step at an earlier budget: it is said once."""
    seconds: float = 0.0


@dataclass(slots=True)
class Comparison:
    case: Case
    verdict: Verdict
    details: str = ""
    trials: list[Trial] = field(default_factory=list)
    eager_bytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    no_meter: str = ""
    """Why there was no second meter."""

    def as_json(self) -> dict[str, Any]:
        trials = [asdict(trial) | {"verdict": trial.verdict.value} for trial in self.trials]
        return {
            "seed": self.case.seed,
            "case": self.case.describe(),
            "verdict": self.verdict.value,
            "details": self.details,
            "eager_bytes": self.eager_bytes,
            "seconds": round(self.seconds, 3),
            "cpu_seconds": round(self.cpu_seconds, 3),
            "no_meter": self.no_meter,
            "trials": trials,
        }


@dataclass(frozen=True, slots=True)
class Settings:
    device: str = "cpu"
    compiler: str | None = None
    budgets: tuple[str, ...] = ()
    """Instead of those whose turn it is."""
    steps: int = STEPS

    def budgets_of(self, case: Case) -> tuple[str, ...]:
        return self.budgets or BUDGETS[case.seed % len(BUDGETS)]


PLAIN = Settings()


def compare(case: Case, settings: Settings = PLAIN) -> Comparison:
    """Run a case in eager and under every budget."""
    began, cpu_began = time.perf_counter(), time.process_time()
    with _same_random_numbers(settings.compiler):
        result = _compare(case, settings)
    result.seconds, result.cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    result.no_meter = meter.why_not() if settings.device == "cpu" else ""
    torch._dynamo.reset()
    gc.collect()
    return result


@contextmanager
def _same_random_numbers(compiler: str | None) -> Iterator[None]:
    """Inductor has numbers of its own, as torch.compile's users know; to be compared it has to draw eager's."""
    if compiler is None:
        yield
        return
    from torch._inductor import config

    with config.patch(fallback_random=True):
        yield


def _compare(case: Case, settings: Settings) -> Comparison:
    try:
        with _warnings_kept() as heard:
            expected, eager_bytes = _run_eager(case, settings)
            again, _ = _run_eager(case, settings)
    except Exception as error:
        return Comparison(case, Verdict.DISCARDED, f"eager: {_first_line(error)}")
    varying = [text for text in map(_text, heard) if VARIES in text]
    if varying:
        return Comparison(case, Verdict.DISCARDED, f"eager: {varying[0]}")
    moved = [difference for left, right in zip(expected, again, strict=True) for difference in differences(left, right)]
    if moved:
        return Comparison(case, Verdict.DISCARDED, f"eager differs from itself: {moved[0]}")
    del again
    trials = _run_budgets(case, settings, expected, eager_bytes)
    worst = max(trials, key=lambda trial: trial.verdict.rank)
    is_off = worst.verdict is Verdict.WRONG_BITS and settings.compiler is not None
    excuse = _excuse(case, settings, expected, worst) if is_off else ""
    if excuse:
        return Comparison(case, Verdict.DISCARDED, f"{excuse}; {worst.details}", trials)
    details = f"at {worst.asked}: {worst.details}" if worst.details else ""
    return Comparison(case, worst.verdict, details, trials, eager_bytes)


def _run_eager(case: Case, settings: Settings) -> tuple[list[Record], int]:
    trainer = Trainer(case, settings.device)
    trainer.seed()
    gauge = _Gauge(settings.device)
    records = [trainer.step(number, gauge.metered) for number in range(settings.steps)]
    return records, gauge.metered_bytes


def _run_budgets(case: Case, settings: Settings, expected: list[Record], eager_bytes: int) -> list[Trial]:
    """Captured once; every fifth case is captured again for its last budget."""
    trials: list[Trial] = []
    trainer: Trainer | None = None
    told: list[str] = []
    budgets = settings.budgets_of(case)
    for place, budget in enumerate(budgets):
        if trainer is None or (place == len(budgets) - 1 and case.seed % 5 == 0):
            trainer, told = None, []
            torch._dynamo.reset()
            trainer = Trainer(case, settings.device)
            trainer.optimize(_optimized(_to_ask_for(budget, settings.device, eager_bytes), settings))
        else:
            trainer.reset()
            remat.set_budget(trainer.call, _to_ask_for(budget, settings.device, eager_bytes))
        trial = _try(trainer, Trial(budget, told=list(told)), settings, expected)
        told += trial.warnings
        trials.append(trial)
        if trial.verdict in (Verdict.CRASH, Verdict.WRONG_BITS):
            break
    return trials


def _to_ask_for(budget: str, device: str, eager_bytes: int) -> str | int:
    """On CUDA a share of what the case itself needs: cuBLAS's workspaces are a hundred times as large."""
    if device == "cpu" or budget == "1x":
        return budget
    gc.collect()
    return torch.cuda.memory_allocated() + int(float(budget.removesuffix("x")) * eager_bytes)


def _optimized(budget: str | int, settings: Settings) -> Callable[[Any], Any]:
    return lambda step: remat.optimize(
        step, budget, time_limit=TIME_LIMIT_S, compiler=settings.compiler, progress=False
    )


def _try(trainer: Trainer, trial: Trial, settings: Settings, expected: list[Record]) -> Trial:
    began = time.perf_counter()
    minimum: int | None = None
    # A step that starts with gradients needs more than the first one, and may be refused after it.
    for _ in range(3 if trainer.case.starts_with_gradients() else 2):
        try:
            if minimum is not None:
                trainer.reset()
                remat.set_budget(trainer.call, int(minimum * ABOVE_MINIMUM))
            _train(trainer, trial, settings, expected)
        except remat.InfeasibleBudget as refusal:
            trial.verdict = Verdict.REFUSED_AGAIN if trial.refused else Verdict.OK
            trial.details = f"said that {minimum} is enough, refused that and 2 %: {_first_line(refusal)}"
            trial.refused, minimum = True, refusal.min_budget
        except Exception as error:
            trial.verdict, trial.details = Verdict.CRASH, _told(error)
            break
        else:
            break
    trial.seconds = time.perf_counter() - began
    if trial.verdict is Verdict.OK and trial.refused:
        trial.verdict = Verdict.REFUSED
    return trial


def _train(trainer: Trainer, trial: Trial, settings: Settings, expected: list[Record]) -> None:
    """All steps, compared one by one; fills in `trial`."""
    trial.verdict, trial.details = Verdict.OK, ""
    trainer.seed()
    gauge, are_alike = _Gauge(settings.device), True
    for number in range(settings.steps):
        is_last = number == settings.steps - 1
        gauge.metered_bytes, graphs = 0, _graphs()
        with _warnings_kept() as heard:
            found = trainer.step(number, gauge.measured if is_last else gauge.metered)
        trial.warnings += dict.fromkeys(text for text in map(_text, heard) if _tells(text))
        apart = _differences(trainer.case, expected[number], found, settings, trial) if are_alike else []
        # Training is chaotic: once gradients were rounded otherwise, later steps may select other rows.
        are_alike = are_alike and (settings.compiler is not None or not differences(expected[number], found))
        trial.apart = apart
        if apart:
            trial.verdict, trial.details = (
                Verdict.WRONG_BITS,
                f"step {number}: {len(apart)} differ: {', '.join(apart[:3])}",
            )
            return
    trial.captured_late = _graphs() - graphs
    if _plan_of(trainer) is None and settings.compiler is None:
        # What was captured again after the first step was watched in no step yet: its memory is that of later ones.
        with _warnings_kept() as heard:
            trainer.step(settings.steps, gauge.metered)
            trainer.step(settings.steps + 1, gauge.measured)
        trial.warnings += dict.fromkeys(text for text in map(_text, heard) if _tells(text))
    trial.metered_bytes, trial.measured_bytes = gauge.metered_bytes, gauge.measured_bytes
    plan = _plan_of(trainer)
    if plan is not None:
        # Steps that begin with gradients have a plan of their own, and "1x" of them is more.
        plans = [plan] if settings.compiler else [item.plan for item in session_of(trainer.call).planned]
        trial.budget_bytes = max(item.budget_bytes for item in plans)
        trial.predicted_bytes = 0 if trainer.case.starts_with_gradients() else plan.predicted_peak
    states = [record["CPU generator"] for record in expected]
    draws = trainer.case.sizes.batch == 0 or any(not same_bits(states[0], state) for state in states)
    _judge(trial, SCALARS_BYTES[settings.device] + GENERATOR_BYTES * draws)


def _judge(trial: Trial, slack: int) -> None:
    """The verdict on steps whose numbers were right; only the last one counts: the first may be watched."""
    peak = max(trial.metered_bytes, trial.measured_bytes)
    over = ""
    if trial.budget_bytes and peak > trial.budget_bytes + slack:
        over = f"{peak} bytes are {peak / trial.budget_bytes - 1:.1%} over {trial.budget_bytes}"
    if trial.warnings:
        trial.verdict = Verdict.WARNED_OVER if over else Verdict.WARNED
        trial.details = "; ".join(filter(None, (over, trial.warnings[0])))
    elif trial.told and (over or not trial.budget_bytes):
        trial.verdict = Verdict.WARNED_OVER if over else Verdict.WARNED
        trial.details = "; ".join(filter(None, (over, f"at an earlier budget: {trial.told[0]}")))
    elif not trial.budget_bytes:
        trial.verdict, trial.details = Verdict.SILENT, "no plan and no warning"
    elif over:
        trial.verdict, trial.details = Verdict.OVER_BUDGET, over


def _differences(case: Case, expected: Record, found: Record, settings: Settings, trial: Trial) -> list[str]:
    if settings.compiler is not None:
        return _far_apart(case, expected, found, TOLERANCE)
    apart = differences(expected, found)
    if apart and documented(case, settings.device, (*trial.told, *trial.warnings)):
        return _far_apart(case, expected, found, ROUNDING)
    return apart


def _far_apart(case: Case, expected: Record, found: Record, tolerance: float) -> list[str]:
    apart = far_apart(expected, found, LOW_PRECISION if _is_lowered(case) else tolerance)
    # AdamW's first steps make a whole step of a gradient that is nothing but rounding.
    return [text for text in apart if case.update is not Update.ADAMW or not text.startswith("after the step")]


def _excuse(case: Case, settings: Settings, expected: list[Record], trial: Trial) -> str:
    """Why compiled code may be as far from eager as in `trial`, in all in which it is; empty where it may not."""
    if case.autocast and _rounds_as_much(case, settings, expected, trial):
        return "eager is as far from full precision"
    # Some of what modules return torch.compile cannot: then what it makes of the rest is asked for.
    simpler = dict.fromkeys((case, replace(case, returns=Returns.NOTHING)))
    is_torchs = any(_torchs_own(item, settings, trial) for item in simpler)
    return "torch.compile differs by itself" if is_torchs else ""


def _rounds_as_much(case: Case, settings: Settings, expected: list[Record], trial: Trial) -> bool:
    exact = _trained(Trainer(replace(case, autocast=False), settings.device), settings)
    lost = [dict(map(_parsed, differences(*pair))) for pair in zip(expected, exact, strict=True)]
    found = dict(map(_parsed, trial.apart))
    return any(all(far <= 2 * step.get(name, 0.0) for name, far in found.items()) for step in lost)


def _torchs_own(case: Case, settings: Settings, trial: Trial) -> bool:
    """Whether torch.compile by itself is far from eager in the gradients in which `trial` is, as at a kink."""
    trainer = Trainer(case, settings.device)
    expected = _trained(trainer, settings)
    torch._dynamo.reset()
    trainer.reset()
    trainer.optimize(lambda step: torch.compile(step, dynamic=False))
    try:
        found = _trained(trainer, settings)
    except Exception:  # whatever torch.compile cannot do by itself is no excuse for us
        return False
    pairs = zip(expected, found, strict=True)
    torchs = {_parsed(text)[0] for pair in pairs for text in _far_apart(case, *pair, TOLERANCE)}
    ours = {name for name, _ in map(_parsed, trial.apart) if not name.startswith("micro-batch")}
    return bool(ours) and ours <= torchs


def _trained(trainer: Trainer, settings: Settings) -> list[Record]:
    trainer.seed()
    return [trainer.step(number) for number in range(settings.steps)]


def _parsed(difference: str) -> tuple[str, float]:
    """A line of `differences`: what differs, and by how much; infinitely where that is no number."""
    name, _, rest = difference.rpartition(" (")
    number, is_distance, _ = rest.partition(" apart")
    return name, float(number) if is_distance else float("inf")


def _is_lowered(case: Case) -> bool:
    return case.autocast or any(name in ("autocast region", "half precision") for name, _ in case.blocks)


class _Gauge:
    """Watches the micro-batches of a step; keeps the highest peak."""

    def __init__(self, device: str) -> None:
        self.meter = meter.open_meter(device)
        self.metered_bytes = 0
        self.measured_bytes = 0

    def metered(self, trainer: Trainer, batches: Batches) -> Any:
        if self.meter is None:
            return trainer.run(batches)
        present = trainer.present_bytes(batches)
        torch.clear_autocast_cache()
        start = self.meter.begin()
        kept = trainer.run(batches)
        self.metered_bytes = max(self.metered_bytes, self.meter.peak_bytes() - start + present)
        return kept

    def measured(self, trainer: Trainer, batches: Batches) -> Any:
        """By both at once: `remat.measure` sees what it can reach from its arguments."""
        kept: list[Any] = []

        def run(module: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
            kept.append(self.metered(trainer, batches))

        found = measure_once(run, trainer.module, trainer.optimizer, batches)
        self.measured_bytes = max(self.measured_bytes, found.peak_bytes)
        return kept.pop()


def _plan_of(trainer: Trainer) -> Any:
    try:
        return remat.plan_of(trainer.call)
    except remat.RematError:
        return None


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@contextmanager
def _warnings_kept() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield heard


def _text(heard: warnings.WarningMessage) -> str:
    return str(heard.message).split("\n")[0]


def _tells(text: str) -> bool:
    return any(part in text.lower() for part in map(str.lower, WARNINGS))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    # An error that shows a whole graph says what is wrong with it at the end.
    text = f"{lines[0]} … {lines[-1]}" if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {text[:300]}"


def _told(error: BaseException) -> str:
    """What was raised, and the last place in Remat or this case where it passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "remat" in frame.filename]
    where = f" [{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno} {frames[-1].name}]" if frames else ""
    return _first_line(error) + where
