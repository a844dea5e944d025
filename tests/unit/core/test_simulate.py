from __future__ import annotations

import pytest
from tests.contract.graphs import Builder

from remat.core import OpId, Problem, Schedule, naive_peak_bytes, plain_schedule, simulate, validate
from remat.errors import InvalidSchedule


def problem(recomputable: bool = True) -> Problem:
    """a → b → c, and c reads a too."""
    build = Builder()
    (a,) = build.add("a", [], [100], 1, recomputable=recomputable)
    (b,) = build.add("b", [a], [10], 2, workspace=50)
    (c,) = build.add("c", [a, b], [1], 3)
    return build.problem([c], resident=1000)


def steps(*numbers: int) -> Schedule:
    return Schedule(tuple(OpId(number) for number in numbers))


def test_counts_resident_outputs_and_workspace() -> None:
    timeline = simulate(problem(), plain_schedule(problem().graph))
    assert timeline.live_bytes == (1100, 1160, 1111)
    assert (timeline.peak_bytes, timeline.peak_step, timeline.time_ns) == (1160, 1, 6)


def test_frees_a_version_before_its_recomputation() -> None:
    timeline = simulate(problem(), steps(0, 1, 0, 2))
    assert timeline.live_bytes == (1100, 1160, 1110, 1111)
    assert timeline.last_uses[0] == (1,)


def test_naive_peak_agrees() -> None:
    assert naive_peak_bytes(problem(), steps(0, 1, 0, 2)) == 1160


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (steps(0, 1), "never runs"),
        (steps(1, 0, 2), "before its input"),
        (steps(0, 1, 2, 3), "the graph has ops"),
        (steps(0, 1, 0, 2), "must run once"),
    ],
)
def test_validate_refuses(schedule: Schedule, expected: str) -> None:
    with pytest.raises(InvalidSchedule, match=expected):
        validate(problem(recomputable=False), schedule)


def test_validate_refuses_a_peak_over_the_budget() -> None:
    with pytest.raises(InvalidSchedule, match="1160 bytes"):
        validate(problem().with_budget(1159), steps(0, 1, 2))
    assert validate(problem().with_budget(1160), steps(0, 1, 2)) == 1160
