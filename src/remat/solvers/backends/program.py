"""A mixed-integer program as sparse rows, and what comes back from solving one.

In: columns between bounds with a cost each, and rows that bound Σ factor · x, added one by one. Every library of
`backends` takes the same `MixedIntegerProgram` and returns the same `ProgramAnswer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

INFINITY = float("inf")
EXACT_GAP = 1e-7
"""Of the optimum: what is left open where it is asked for."""

Point = Mapping[int, float]
"""A known point to start from, at least its whole-numbered columns."""
NO_POINT: Point = MappingProxyType({})


@dataclass(slots=True)
class MixedIntegerProgram:
    """Minimise cost · x; x is 0 or 1 unless its column says otherwise. Grows column by column and row by row."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)

    def add_column(self, cost: float, lower: float = 0.0, upper: float = 1.0, *, integer: bool = True) -> int:
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def add_row(self, terms: Iterable[tuple[int, float]], lower: float = -INFINITY, upper: float = INFINITY) -> None:
        for column, factor in terms:
            self.columns.append(column)
            self.factors.append(factor)
        self.starts.append(len(self.columns))
        self.row_lower.append(lower)
        self.row_upper.append(upper)

    def rows(self) -> Iterator[tuple[list[int], list[float], str, float]]:
        """Columns, factors, sense and limit of each row; one that is bounded on both sides comes twice."""
        for row, (lower, upper) in enumerate(zip(self.row_lower, self.row_upper, strict=True)):
            part = slice(self.starts[row], self.starts[row + 1])
            for sense, limit in (("<", upper), (">", lower)):
                if abs(limit) < INFINITY:
                    yield self.columns[part], self.factors[part], sense, limit


@dataclass(frozen=True, slots=True)
class ProgramAnswer:
    """`point` is None when none was found in time; `bound` is infinite when there is provably none."""

    point: tuple[float, ...] | None
    bound: float
    complete: bool
    """Solved to the gap that was asked for, rather than stopped by a limit."""
