"""What a plan says of itself."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.core.plans import small_plan


def test_a_plan_is_one_line_where_it_is_printed() -> None:
    """Its graph has thousands of ops."""
    plan = small_plan()
    other = replace(plan, fingerprint=replace(plan.fingerprint, device="another device"))
    assert "\n" not in repr(plan) and len(repr(plan)) < 120
    assert repr(plan).startswith("<Plan: ") and f"{plan.overhead:+.1%} time" in repr(plan)
    assert repr(plan) == str(plan) != repr(other)
