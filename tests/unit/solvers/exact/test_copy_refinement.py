"""More cuts for problems with copies: what has not raised the bound is not built upon, and schedules get the time."""

from __future__ import annotations

import pytest
from tests.unit.solvers.exact.test_copy_reserves import moving

from remat.core.search.limits import Limits
from remat.solvers.exact import copy_refinement
from remat.solvers.exact.copy_cuts import bound_with_copies
from remat.solvers.exact.copy_refinement import IDLE_ROUNDS, refine

pytest.importorskip("highspy")
LIMITS = Limits(3.0)


def test_rounds_build_on_the_highest_bound_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, grown, real = moving(0.4), list[tuple[int, ...]](), copy_refinement._solved
    start = bound_with_copies(problem, LIMITS, lambda: False)

    def noted(asked, cuts, model, answer):  # type: ignore[no-untyped-def]
        grown.append(cuts)
        return real(asked, cuts, model, answer)

    monkeypatch.setattr(copy_refinement, "_solved", noted)
    bounds = [found.extra_time for found in refine(problem, start, LIMITS, lambda: False)]
    best, highest, idle = (start.cut,), start.extra_time, 0
    for cuts, bound in zip(grown, bounds, strict=True):
        assert set(best) < set(cuts) and len(cuts) == len(best) + 1
        assert idle < IDLE_ROUNDS
        idle += 1
        if bound > highest + copy_refinement.GAIN * problem.base_time_ns:
            best, highest, idle = cuts, bound, 0
    assert grown and len(set(grown)) == len(grown)
