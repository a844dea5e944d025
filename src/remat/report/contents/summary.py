"""A report in words: a headline, a few figures, and short answers to the questions a reader has.

In: a `Report`. Out: a `Summary` of plain text, the same for every format. It says what the peak is made of, what Remat
does about it, what that costs, and how sure all of this is.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.budget import format_bytes
from remat.core.results.pareto import Pareto
from remat.core.results.plan import Plan
from remat.core.results.profile import BEFORE, MemoryClass, StepProfile
from remat.core.solution import Status
from remat.report.contents.gathered import Report
from remat.report.contents.lifetimes import idle_share
from remat.report.tables.sharing import sharing_words
from remat.report.tables.text import gap_share


@dataclass(frozen=True, slots=True)
class Figure:
    """One number worth a large type; `before` is empty where there is only one."""

    label: str
    value: str
    note: str
    before: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Summary:
    headline: str
    figures: tuple[Figure, ...]
    answers: tuple[Answer, ...]


def summarize(report: Report) -> Summary:
    answers = [
        *_filled(report.before),
        *_done(report),
        *_cost(report),
        *_shared(report),
        *_certainty(report),
        *_curve(report.pareto),
    ]
    return Summary(_headline(report), tuple(_figures(report)), tuple(answers))


def format_ns(nanoseconds: float) -> str:
    """`1500000.0` as "1.50 ms"."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(nanoseconds) >= size:
            return f"{_digits(nanoseconds / size)} {unit}"
    return f"{_digits(nanoseconds)} ns"


def short_target(target: str) -> str:
    """`aten.mm.default` as "mm"."""
    pieces = target.split(".")
    return pieces[1] if len(pieces) == 3 else target


def _digits(number: float) -> str:
    """Three digits that count, as `3.40` and `532`."""
    return f"{number:,.0f}" if abs(number) >= 100 or number == 0 else f"{number:#.3g}"


def _headline(report: Report) -> str:
    before, after, plan = report.before, report.after, report.plan
    if before is not None and after is not None and before.peak_bytes:
        change = 1 - after.peak_bytes / before.peak_bytes
        memory = f"{abs(change):.0%} {'less' if change >= 0 else 'more'} memory"
        return f"{report.name} trains in {memory}, {_more(_overhead(report))}"
    if plan is not None and plan.schedule is None:
        return f"{report.name} does not fit in {format_bytes(plan.budget_bytes)}"
    if before is not None:
        largest = next(iter(before.breakdown().items()), None)
        made = f", {largest[1] / before.peak_bytes:.0%} of it {largest[0].value}" if largest else ""
        return f"{report.name} takes {format_bytes(before.peak_bytes)} at its peak{made}"
    return f"What memory costs: {report.name}"


def _more(share: float) -> str:
    if share < 0:
        return f"and {-share:.1%} less time"
    return "at no cost in time" if share < 5e-4 else f"for {share:.1%} more time"


def _overhead(report: Report) -> float:
    if report.plan is not None and report.after is not None and report.after.is_estimate:
        return report.plan.overhead
    before, after = report.before, report.after
    return after.seconds / before.seconds - 1 if before and after and before.seconds > 0 else 0.0


def _figures(report: Report) -> list[Figure]:
    before, after, plan = report.before, report.after, report.plan
    found: list[Figure] = []
    if before is not None and after is not None:
        saved = before.peak_bytes - after.peak_bytes
        budget = f" · budget {format_bytes(plan.budget_bytes)}" if plan is not None else ""
        peaks = format_bytes(after.peak_bytes), f"{format_bytes(saved)} less{budget}", format_bytes(before.peak_bytes)
        times = format_ns(after.seconds * 1e9), f"{_overhead(report):+.1%} per step", format_ns(before.seconds * 1e9)
        found += [Figure("Peak memory", *peaks), Figure("Step time", *times)]
    elif before is not None:
        found += [Figure("Peak memory", format_bytes(before.peak_bytes), _where(before))]
        found += [Figure("Step time", format_ns(before.seconds * 1e9), f"{len(before.ops):,} operators")]
        held = sum(item.size_bytes for item in before.storages if item.waits_for_backward)
        found += [Figure("Kept for backward", format_bytes(held), f"unused {idle_share(before):.0%} of the step")]
    if plan is not None:
        found.append(_certain_figure(plan))
    return found


def _certain_figure(plan: Plan) -> Figure:
    if plan.status is Status.OPTIMAL:
        return Figure("Fastest possible?", "Yes", "proven for this budget")
    if plan.status is Status.FEASIBLE:
        return Figure("From the fastest possible", f"≤ {gap_share(plan.gap)}", "proven bound on any schedule")
    return Figure("Smallest known budget", format_bytes(plan.min_budget), f"asked {format_bytes(plan.budget_bytes)}")


def _filled(step: StepProfile | None) -> list[Answer]:
    if step is None:
        return []
    parts = [
        f"{format_bytes(size)} {kind.value} ({_share(size, step.peak_bytes)})"
        for kind, size in step.breakdown().items()
    ]
    text = f"At its fullest, the step holds {format_bytes(step.peak_bytes)}: {_listed(parts)}. {_when(step)}"
    idle = idle_share(step)
    if MemoryClass.ACTIVATION in step.breakdown() and idle:
        text += (
            " Activations are what forward computes and backward reads again; between the two they lie unused, "
            f"an average byte for {idle:.0%} of the step."
        )
    if step.stopped_by:
        text += f" The step did not come to its end: {step.stopped_by}"
    return [Answer("What fills the memory", text)]


def _when(step: StepProfile) -> str:
    if step.peak_op == BEFORE:
        return "No operator was recorded."
    op = step.ops[step.peak_op]
    inside = f" in {op.module}" if op.module else ""
    return f"That is during {op.phase.value}, while {short_target(op.target)}{inside} runs."


def _where(step: StepProfile) -> str:
    return f"during {step.ops[step.peak_op].phase.value}" if step.ops else "no operator recorded"


def _done(report: Report) -> list[Answer]:
    plan = report.plan
    if plan is None:
        return []
    if plan.schedule is None:
        text = f"Nothing yet: no schedule fits in {format_bytes(plan.budget_bytes)}. {plan.solution.reason}".strip()
        return [Answer("What Remat does about it", text)]
    rows = plan.explain().rows
    again = sum(plan.schedule.recomputed().values())
    away = sum(row.offloaded_bytes for row in rows)
    if away and not again:
        text = f"{format_bytes(away)} of values spend a while on the host ({plan.offload}) and come back in time."
        return [Answer("What Remat does about it", f"Nothing is computed again: {text}")]
    if not again:
        return [Answer("What Remat does about it", "Nothing has to change: the step fits the budget as it is.")]
    freed = sum(row.plain_kept_bytes - row.kept_bytes for row in rows)
    most = sorted((row for row in rows if row.recompute_time_ns), key=lambda row: -row.recompute_time_ns)[:3]
    text = (
        f"Where the plain step holds everything until backward needs it, Remat holds {format_bytes(freed)} less when "
        f"backward begins. It drops those values and computes them again just before they are used: "
        f"{again:,} of {len(plan.schedule.steps):,} operator runs are recomputations"
    )
    text += f", most of them in {_listed([row.module for row in most])}." if most else "."
    text += f" {format_bytes(away)} of other values spend a while on the host ({plan.offload})." if away else ""
    return [Answer("What Remat does about it", text)]


def _cost(report: Report) -> list[Answer]:
    plan = report.plan
    if plan is None or plan.schedule is None:
        return []
    extra, base = plan.solution.time_ns - plan.plain_time_ns, plan.plain_time_ns
    share = plan.budget_bytes / plan.plain_peak_bytes if plan.plain_peak_bytes else 0.0
    fits = (
        f"the peak falls to {format_bytes(plan.predicted_peak)}, within the budget of {format_bytes(plan.budget_bytes)}"
    )
    price = f"{format_ns(extra)} on top of {format_ns(base)}, or {plan.overhead:.2%}" if extra > 0 else "no time at all"
    text = f"Recomputing takes {price}. In return {fits} ({share:.2f} times the plain peak). "
    same = "bit for bit" if plan.compiled is None else "up to the rounding of compiled kernels"
    return [Answer("What it costs", f"{text}Losses and gradients stay the same, {same}.")]


def _shared(report: Report) -> list[Answer]:
    parts = [
        f"{title}. {sharing_words(step, found)}" if len(report.steps) > 1 else sharing_words(step, found)
        for (title, step), found in zip(report.steps, report.footprints, strict=True)
    ]
    return [Answer("How memory is shared", " ".join(parts))] if parts else []


def _certainty(report: Report) -> list[Answer]:
    parts: list[str] = []
    plan = report.plan
    if plan is not None and plan.status is Status.OPTIMAL:
        parts.append(
            "Proven: of all schedules that compute the operators in the model's order and stay within the budget, "
            "none is faster."
        )
    elif plan is not None and plan.status is Status.FEASIBLE:
        parts.append(
            f"No schedule within the budget can take less than {format_ns(plan.bound)}; this one is at most "
            f"{gap_share(plan.gap)} from the fastest."
        )
    elif plan is not None:
        parts.append(f"The smallest budget for which a schedule is known is {format_bytes(plan.min_budget)}.")
    if plan is not None and plan.compiled is not None and plan.compiled.seen_ns:
        alone, seen = plan.compiled.time_ns, plan.compiled.seen_ns
        parts.append(
            f"Its kernels, timed one by one before the first step, take {format_ns(alone)}; its first steps took "
            f"{format_ns(seen)} on the device ({seen / alone - 1:+.1%})."
        )
    measured = [title for title, step in report.steps if not step.is_estimate]
    predicted = [title for title, step in report.steps if step.is_estimate]
    if predicted:
        parts.append(
            "Memory is predicted from the size and life of every tensor, time from the cost of every operator."
        )
    if measured:
        parts.append("Memory and time were measured on a real step.")
    if measured and predicted:
        parts.append(f"Measured: {_listed(measured)}; predicted: {_listed(predicted)}.")
    return [Answer("How sure this is", " ".join(parts))] if parts else []


def _curve(pareto: Pareto | None) -> list[Answer]:
    if pareto is None or not pareto.points:
        return []
    smallest = min(pareto.points, key=lambda point: point.budget_bytes)
    text = (
        f"The plain step needs {format_bytes(pareto.plain_peak_bytes)}. The smallest budget tried, "
        f"{format_bytes(smallest.budget_bytes)}, costs {pareto.overhead(smallest.time_ns):.1%} more time; no schedule "
        f"fits in less than {format_bytes(pareto.floor_bytes)}."
    )
    half = [point for point in pareto.points if point.budget_bytes * 2 <= pareto.plain_peak_bytes]
    if half:
        best = min(half, key=lambda point: point.time_ns)
        text += f" Half the memory costs {pareto.overhead(best.time_ns):.1%}."
    return [Answer("What other budgets cost", text)]


def _share(part: int, whole: int) -> str:
    share = part / whole if whole else 0.0
    return "below 1%" if 0 < share < 0.005 else f"{share:.0%}"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else "nothing"
