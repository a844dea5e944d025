"""A few steps under a budget beside the plain one: what is planned, what is not and why, and what to do about it.

In: what a user trains with, and a budget. Out: a `Diagnosis`. The step is run plainly, then optimized until it is
planned, compared, measured, and watched for what it keeps outside of the plan; what it changes is put back. A budget
that is too small is a finding: the rest is then found out under the smallest one that works.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from remat.core.budget import Budget, parse_budget
from remat.core.results.diagnosis import Diagnosis, Finding
from remat.core.results.plan import Plan
from remat.errors import InfeasibleBudget
from remat.pytorch._compat.tensors import storage_address
from remat.pytorch._compat.trace_report import Stop, retrace_reasons, stops_noted
from remat.pytorch.device import total_bytes
from remat.pytorch.measure import findings
from remat.pytorch.measure.measure_step import measure_once
from remat.pytorch.measure.subject import Subject, subject_of
from remat.pytorch.measure.verify import StepState, Verification, verify_subject
from remat.pytorch.reach import reachable_from
from remat.pytorch.run.optimize import eager_session_of, optimize, set_budget
from remat.pytorch.run.session import Session

STEPS = 4
"""Until a step is planned that breaks into graphs: captured, watched, planned, and one more that changes nothing."""
_MOST_BUDGETS = 8
_MORE = 1.02
"""By how much a budget is raised that was said to work and does not."""


def doctor(
    step: Any, *args: Any, budget: str | int | float | Budget, time_limit: float = 10.0, **kwargs: Any
) -> Diagnosis:
    """Run a few steps under `budget` and say what is planned, what is not and why, and what to do.

    `step` is a module with its arguments, a function that is a whole training step, a Lightning module with a batch, or
    a Trainer of transformers, which brings its own batch. What the steps change is put back.
    """
    subject = subject_of(step, args, kwargs)
    state = StepState.of(subject)
    try:
        return _diagnose(subject, parse_budget(budget), time_limit, getattr(step, "__name__", type(step).__name__))
    finally:
        state.restore()


@dataclass(frozen=True, slots=True)
class Plain:
    """What the step does without Remat."""

    fits: bool = True
    """Whether it has come to its end on this device."""
    saved_bytes: int | None = None
    """What it keeps for backward; None where that cannot be seen."""
    goes_back: bool = True


@dataclass(slots=True)
class Seen:
    """What was noted while optimized steps ran."""

    stops: list[Stop] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    captures: list[int] = field(default_factory=list)
    retraced: list[str] = field(default_factory=list)
    refused: InfeasibleBudget | None = None
    """The budget that was asked for is too small."""
    raised: Exception | None = None
    """The plain step has come to its end and the optimized one has not."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What the planned step was found to do."""

    bits: Verification | None = None
    repeats: bool = True
    """Whether the plain step gives the same bits twice."""
    measured_bytes: int | None = None
    unplanned_bytes: int | None = None


def _diagnose(subject: Subject, budget: Budget, time_limit: float, name: str) -> Diagnosis:
    plain_warnings: list[str] = []
    with _warnings_noted(plain_warnings):
        plain = _run_plainly(subject)
    optimized = optimize(subject.step, budget, time_limit=time_limit, progress=False, on_infeasible="raise")
    session = eager_session_of(optimized)
    seen = _run_until_planned(subject, optimized, session)
    checked = Checked() if seen.raised is not None else _check(subject, optimized, session, can_compare=plain.fits)
    seen.warned = [text for text in dict.fromkeys(seen.warned) if text not in plain_warnings]
    plan = session.plan
    return Diagnosis(
        name=name,
        budget_bytes=_asked_bytes(budget, plan, session) if plan is not None else None,
        graphs=len(session.calls) if plan is not None else 0,
        ops=sum(len(call.variant.captured.graph.ops) for call in session.calls) if plan is not None else 0,
        saved_bytes=plain.saved_bytes,
        unplanned_bytes=checked.unplanned_bytes,
        same_bits=checked.bits.ok if checked.bits is not None and checked.repeats else None,
        plain_peak_bytes=plan.plain_peak_bytes if plan is not None else None,
        predicted_peak_bytes=plan.predicted_peak if plan is not None else None,
        measured_peak_bytes=checked.measured_bytes,
        captures=tuple(seen.captures),
        findings=tuple(_findings(subject, session, plain, seen, checked)),
    )


def _asked_bytes(budget: Budget, plan: Plan, session: Session) -> int:
    """Not the plan's, which is larger where the budget was refused."""
    return budget.resolve(plain_peak_bytes=plan.plain_peak_bytes, device_bytes=total_bytes(session.owner.device()))


def _run_plainly(subject: Subject) -> Plain:
    try:
        return _plain_with_saved(subject)
    except torch.OutOfMemoryError:
        return Plain(fits=False)


def _plain_with_saved(subject: Subject) -> Plain:
    try:
        saved = SavedBytes.of(subject, subject.step)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # Transforms of torch.func refuse hooks; whatever else is wrong, the step now says itself.
        outputs = _run(subject, subject.step)
        has_gradients = bool(reachable_from(subject.step).tensors["gradients"])
        return Plain(goes_back=has_gradients or not any(output.requires_grad for output in outputs))
    return Plain(saved_bytes=saved.total, goes_back=saved.were_read)


def _run_until_planned(subject: Subject, optimized: Any, session: Session) -> Seen:
    seen = Seen()
    before = len(retrace_reasons())
    with _warnings_noted(seen.warned), stops_noted(seen.stops):
        for _ in range(STEPS):
            count = _captured(session)
            try:
                _run_within_what_works(subject, optimized, seen)
            except Exception as error:
                seen.raised = error
                break
            seen.captures.append(_captured(session) - count)
            if len(seen.captures) == 1:
                before = len(retrace_reasons())
    seen.retraced = list(dict.fromkeys(retrace_reasons()[before:]))
    return seen


def _captured(session: Session) -> int:
    return len(session.graphs) + session.left_out


def _run_within_what_works(subject: Subject, optimized: Any, seen: Seen) -> None:
    """One step; a budget that is refused gives way to the smallest that is known to work."""
    budget = 0
    for _ in range(_MOST_BUDGETS):
        try:
            _run(subject, optimized)
            return
        except InfeasibleBudget as error:
            seen.refused = seen.refused or error
            budget = max(error.min_budget, int(budget * _MORE))
            set_budget(optimized, budget)
    _run(subject, optimized)


def _run(subject: Subject, step: Any) -> list[torch.Tensor]:
    if isinstance(step, nn.Module):
        step.zero_grad(set_to_none=True)
    return subject.run(step)


def _check(subject: Subject, optimized: Any, session: Session, *, can_compare: bool) -> Checked:
    # What is warned of here comes from the instruments.
    with _warnings_noted([]):
        bits = verify_subject(subject, optimized) if can_compare else None
        repeats = bits is None or bits.ok or verify_subject(subject, subject.step).ok
        if isinstance(optimized, nn.Module):
            optimized.zero_grad(set_to_none=True)
        measured = measure_once(functools.partial(subject.run, optimized)).peak_bytes
        return Checked(bits, repeats, measured, _unplanned_bytes(subject, optimized, session))


def _unplanned_bytes(subject: Subject, optimized: Any, session: Session) -> int | None:
    """What is kept outside of the plan; a step that is captured anew meanwhile tells nothing."""
    count = _captured(session)
    try:
        saved = SavedBytes.of(subject, optimized)
    except RuntimeError:
        return None
    return saved.total if _captured(session) == count else None


@dataclass(slots=True)
class SavedBytes:
    """What autograd keeps for backward in one step, beside what is there before; plans keep theirs elsewhere."""

    resident: set[int]
    storages: dict[int, int] = field(default_factory=dict)
    were_read: bool = False

    @staticmethod
    def of(subject: Subject, step: Any) -> SavedBytes:
        reached = reachable_from(step, subject.inputs).tensors
        found = SavedBytes({address for members in reached.values() for address in members})
        with torch.autograd.graph.saved_tensors_hooks(found._pack, found._unpack):
            _run(subject, step)
        return found

    @property
    def total(self) -> int:
        return sum(self.storages.values())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if (address := storage_address(tensor)) not in self.resident:
            self.storages[address] = tensor.untyped_storage().nbytes()
        return tensor

    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.were_read = True
        return tensor


@contextmanager
def _warnings_noted(texts: list[str]) -> Iterator[None]:
    """Keep what is warned of meanwhile, each as one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts += [" ".join(str(item.message).split()) for item in caught]


def _findings(subject: Subject, session: Session, plain: Plain, seen: Seen, checked: Checked) -> Iterator[Finding]:
    stops = [stop for stop in seen.stops if not stop.is_expected]
    yield from (findings.of_stop(stop, subject.step) for stop in stops)
    yield from filter(None, (findings.of_warning(text, is_told=bool(seen.stops)) for text in seen.warned))
    if seen.raised is not None:
        yield findings.of_error(seen.raised)
    elif session.plan is None and session.graphs:
        yield findings.of_no_plan(STEPS)
    elif not plain.goes_back or (session.plan is None and not stops and not session.left_out):
        yield findings.of_nothing_planned(subject.step, goes_back=plain.goes_back)
    if seen.refused is not None:
        yield findings.of_refused(seen.refused)
    elif session.plan is not None and (checked.measured_bytes or 0) > session.plan.budget_bytes:
        yield findings.of_excess(checked.measured_bytes or 0, session.plan.budget_bytes)
    if not plain.fits:
        yield findings.of_plain_too_large()
    elif checked.bits is not None and not checked.bits.ok:
        yield findings.of_differences(checked.bits.differences, repeats=checked.repeats)
    if sum(seen.captures[1:]):
        yield findings.of_recaptures(seen.captures, seen.retraced)
