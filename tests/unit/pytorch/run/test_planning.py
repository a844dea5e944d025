"""What a training that has begun goes on with."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest

from remat.core.budget import Budget, BudgetUnit
from remat.errors import InfeasibleBudget
from remat.pytorch.run.planning import leanest_plan


@dataclass(frozen=True)
class Found:
    predicted_peak: int


def finding(peak: int, least: int) -> Any:
    """A search that refuses what is below `least`, and with so much finds what needs `peak`."""

    def plan_for(budget: Budget) -> Found:
        if budget.amount < least:
            raise InfeasibleBudget("Too little; raise it.", least)
        return Found(peak)

    return plan_for


REFUSED = InfeasibleBudget("Budget 100 B is below 120 B; raise it.", 120)


def test_leanest_plan_above_the_budget_is_told() -> None:
    with pytest.warns(UserWarning, match=r"^Budget 100 B is below 120 B: this step has begun.*20 B over its budget"):
        plan = leanest_plan(Budget(100, BudgetUnit.BYTES), REFUSED, finding(120, 120))
    assert plan.predicted_peak == 120


def test_nothing_is_told_where_a_search_with_more_room_finds_what_fits() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = leanest_plan(Budget(100, BudgetUnit.BYTES), REFUSED, finding(90, 120))
    assert plan.predicted_peak == 90
