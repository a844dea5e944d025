from __future__ import annotations

import pytest
from tests.unit.core.plans import small_plan

from remat.core import Status
from remat.core.results.explain import explain_modules
from remat.errors import UnknownName

PLAN = small_plan()


def test_rows_are_the_direct_parts_of_the_model() -> None:
    explanation = PLAN.explain()
    assert [row.module for row in explanation.rows] == ["(no module)", "layers.0", "layers.1", "layers.2"]


def test_shares_add_up_to_the_overhead() -> None:
    assert PLAN.explain().share == pytest.approx(PLAN.overhead)
    assert PLAN.explain("layers").share == pytest.approx(PLAN.overhead)


def test_lists_what_a_module_recomputes() -> None:
    row = next(row for row in PLAN.explain().rows if row.recomputed)
    (again,) = PLAN.explain(row.module).rows
    assert again == row
    assert row.recompute_time_ns > 0
    assert set(row.recomputed) <= {"norm", "up", "gelu", "drop", "down", "add"}


def test_text_names_modules_and_recomputed_ops() -> None:
    text = str(PLAN.explain("layers"))
    assert text.startswith("layers: keeps ")
    assert "layers.2" in text and "recomputes" in text


def test_unknown_module_is_refused_with_close_matches() -> None:
    with pytest.raises(UnknownName, match=r"layers\.2"):
        PLAN.explain("layer.2")


def test_module_name_matches_whole_parts_only() -> None:
    with pytest.raises(UnknownName):
        PLAN.explain("lay")


def test_comparison_lists_this_plan_first_and_strategies_over_budget() -> None:
    comparison = PLAN.compare("none", "full")
    assert [row.solver for row in comparison.rows] == ["auto", "none", "full"]
    assert comparison.rows[0].fits and not comparison.rows[1].fits
    assert comparison.rows[1].status is Status.INFEASIBLE
    assert comparison.rows[1].peak_bytes == PLAN.plain_peak_bytes
    assert "none" in str(comparison) and "overhead" in str(comparison)


def test_comparison_defaults_to_the_known_strategies() -> None:
    assert len(PLAN.compare().rows) == 5


def test_rows_of_all_modules_add_up_to_the_rows_of_the_parts() -> None:
    modules, parts = explain_modules(PLAN), PLAN.explain()
    assert modules.share == pytest.approx(parts.share)
    assert modules.kept_bytes == parts.kept_bytes
    assert {row.module for row in modules.rows} == {"(no module)", "layers.0", "layers.1", "layers.2"}


def test_plain_step_keeps_what_the_plan_drops() -> None:
    rows = PLAN.explain().rows
    assert sum(row.plain_kept_bytes for row in rows) > sum(row.kept_bytes for row in rows)
