"""What ops cost at sizes where nobody has run them.

In: one graph captured at a few sizes, and what its ops took there. Out: `Costs` at any other. Bytes of values are
exact, by what was traced. Times are fitted, for choosing between schedules. What kernels work in follows an exact law
where there is one, and else a fitted one that is raised until it is below nothing that was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from remat.core.fit import ExactLaw, Law, fit, fit_exactly
from remat.core.problem import Costs, Problem
from remat.core.scaled import amount_at
from remat.core.schedule import plain_schedule
from remat.core.simulate import simulate
from remat.pytorch._compat.symbols import Amount, Sizes, Symbols
from remat.pytorch.costs.plain_peak import PlainStep
from remat.pytorch.costs.plain_watch import PlainOp
from remat.pytorch.graph.capture import Captured
from remat.pytorch.graph.instance import rounded_amounts

DEGREE = 2


@dataclass(frozen=True, slots=True)
class CostSample:
    """A graph at some sizes, with what its ops took there."""

    sizes: Sizes
    captured: Captured
    costs: Costs


@dataclass(frozen=True, slots=True)
class Raised:
    """A fitted law, times what lifts it to everything that was measured."""

    law: Law
    factor: float

    def at(self, size: int) -> int:
        return amount_at(replace(self.law, coefficients=self._coefficients()), size)

    def _coefficients(self) -> tuple[float, float, float]:
        one, two, three = self.law.coefficients
        return one * self.factor, two * self.factor, three * self.factor


@dataclass(frozen=True, slots=True)
class CostLaws:
    """Costs of one graph at any sizes."""

    symbols: Symbols
    template: Captured
    amounts: tuple[Amount, ...]
    times: tuple[Law, ...]
    workspaces: tuple[ExactLaw | Raised, ...]

    def captured_at(self, sizes: Sizes) -> Captured:
        """The graph with the bytes that its values have at `sizes`."""
        asked = tuple(self.symbols.amount(amount, sizes) for amount in self.amounts)
        return replace(self.template, asked_bytes=asked, size_bytes=rounded_amounts(self.template, asked))

    def costs_at(self, sizes: Sizes) -> Costs:
        captured = self.captured_at(sizes)
        places = _places(captured, sizes)
        return Costs(
            time_ns=tuple(law.at(place) for law, place in zip(self.times, places, strict=True)),
            workspace_bytes=tuple(law.at(place) for law, place in zip(self.workspaces, places, strict=True)),
            size_bytes=captured.size_bytes,
        )


def _places(captured: Captured, sizes: Sizes) -> Sequence[int]:
    """For each op, what its laws are over: the one size, or where there are several, the bytes it reads and writes."""
    if len(sizes) == 1:
        return sizes * len(captured.graph.ops)
    asked = captured.asked_bytes
    return [1 + sum(asked[value] for value in (*op.inputs, *op.outputs)) for op in captured.graph.ops]


def find_laws(symbols: Symbols, amounts: tuple[Amount, ...], samples: Sequence[CostSample]) -> CostLaws:
    """From samples at two sizes or more; the first is the template."""
    rows = [_places(sample.captured, sample.sizes) for sample in samples]
    places = list(zip(*rows, strict=True))
    times = zip(*(sample.costs.time_ns for sample in samples), strict=True)
    spaces = zip(*(sample.costs.workspace_bytes for sample in samples), strict=True)
    time_law, space_law = cache(_time_law), cache(_space_law)
    return CostLaws(
        symbols,
        samples[0].captured,
        amounts,
        tuple(time_law(*pair) for pair in zip(places, times, strict=True)),
        tuple(space_law(*pair) for pair in zip(places, spaces, strict=True)),
    )


def _time_law(places: tuple[int, ...], amounts: tuple[float, ...]) -> Law:
    if len(set(places)) < 2:
        most = max(amounts)
        return Law((most, 0.0, 0.0), tuple(map(float, places)), amounts, amounts)
    return fit(places, amounts, degree=DEGREE)


def _space_law(places: tuple[int, ...], amounts: tuple[int, ...]) -> Any:
    if len(set(amounts)) == 1 or len(set(places)) < 2:
        return ExactLaw((max(amounts),), 1)
    if len(set(places)) == len(places) and (exact := fit_exactly(places, amounts, degree=DEGREE)) is not None:
        return exact
    law = fit(places, amounts, degree=DEGREE)
    pairs = [(law.at(place), amount) for place, amount in zip(places, amounts, strict=True)]
    if any(guess <= 0 < amount for guess, amount in pairs):
        # Taken anywhere as much as the most that was seen for each byte.
        steepest = max(amount / place for place, amount in zip(places, amounts, strict=True))
        return Raised(replace(law, coefficients=(0.0, steepest, 0.0)), 1.0)
    return Raised(law, max([1.0, *(amount / guess for guess, amount in pairs if guess > 0)]))


@dataclass(frozen=True, slots=True)
class FollowedPlain:
    """A plain step that was followed at some sizes."""

    step: PlainStep
    peak_bytes: int
    kept_bytes: int
    """What the schedule that keeps everything needs there."""


def plain_at(known: Sequence[FollowedPlain], problem: Problem) -> PlainStep:
    """The plain step of a problem, from those that were followed: as much larger as the schedule that keeps all is."""
    here = kept_bytes(problem)
    nearest = min(known, key=lambda item: abs(item.kept_bytes - here))
    factor, followed = here / max(1, nearest.kept_bytes), nearest.step
    resident = followed.resident_bytes

    def scaled(amount: int) -> int:
        return resident + round((amount - resident) * factor)

    return PlainStep(
        (PlainOp("", scaled(nearest.peak_bytes), 0),),
        resident,
        scaled(followed.held_bytes),
        followed.device,
        output_bytes=round(followed.output_bytes * factor),
    )


def kept_bytes(problem: Problem) -> int:
    """The peak of the schedule that computes everything once."""
    return simulate(problem, plain_schedule(problem.graph)).peak_bytes
