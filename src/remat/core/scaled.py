"""A problem as a function of a size: the batch or the sequence length.

In: laws of every op's time and workspace and of every value's bytes (see `fit`). Out: the `Problem` at a size that
nobody has captured or measured, the peak of the plain step there, and by how much its time may be off. Bytes of values
follow exact laws; times, and workspaces that follow none, are fitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from remat.core.fit import ExactLaw, Law, fit, fit_exactly, sum_error
from remat.core.graph import Graph
from remat.core.problem import Costs, Problem

Bytes = ExactLaw | Law


@dataclass(frozen=True, slots=True)
class ScaledOp:
    """One op of the plain step: what is in memory just after it, and what its kernel works in."""

    live: Bytes
    workspace: Bytes


@dataclass(frozen=True, slots=True)
class ScaledProblem:
    graph: Graph
    times: tuple[Law, ...]
    workspaces: tuple[Bytes, ...]
    values: tuple[ExactLaw, ...]
    resident: Bytes
    plain: tuple[ScaledOp, ...]
    grain_bytes: int = 1
    """The allocator hands out multiples of this."""

    def at(self, size: int, budget_bytes: int = 0) -> Problem:
        """The problem at `size`."""
        amount = cache(lambda law: amount_at(law, size))
        grain = self.grain_bytes
        costs = Costs(
            time_ns=tuple(law.at(size) for law in self.times),
            workspace_bytes=tuple(amount(law) for law in self.workspaces),
            size_bytes=tuple(-(-amount(law) // grain) * grain for law in self.values),
        )
        return Problem(self.graph, costs, budget_bytes, amount(self.resident))

    @property
    def is_exact(self) -> bool:
        """Whether everything that memory is made of follows an exact law, workspaces included."""
        plain = (law for item in self.plain for law in (item.live, item.workspace))
        laws = (*self.workspaces, self.resident, *plain)
        return all(isinstance(law, ExactLaw) for law in laws)

    def plain_peak_bytes(self, size: int) -> int:
        """The peak of plain eager at `size`; a kernel's workspace comes on top of what is in memory while it runs."""
        amount = cache(lambda law: amount_at(law, size))
        needs = (amount(item.live) + amount(item.workspace) for item in self.plain)
        return amount(self.resident) + max(needs, default=0)

    def time_error(self, size: int) -> float:
        """By which share of the step the sum of all op times may be off at `size`."""
        return sum_error(self.times, size)


def amount_at(law: Bytes, size: int) -> int:
    """Whole bytes, rounded up."""
    # A fitted sum of floats may miss a whole number by a hair.
    return law.at(size) if isinstance(law, ExactLaw) else max(0, math.ceil(law.at(size) - 1e-6))


def fit_bytes(sizes: Sequence[int], amounts: Sequence[int], *, degree: int = 2) -> Bytes:
    """An exact law where there is one, else a fitted one."""
    return fit_exactly(sizes, amounts, degree=degree) or fit(sizes, amounts, degree=degree)
