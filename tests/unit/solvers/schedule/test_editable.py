from __future__ import annotations

import random

import pytest
from tests.contract import graphs

from remat.core import Problem, simulate, validate
from remat.solvers.schedule.editable import EditableSchedule


def check(problem: Problem, editable: EditableSchedule) -> None:
    schedule = editable.schedule()
    validate(problem, schedule)
    timeline = simulate(problem, schedule)
    assert tuple(editable.load) == timeline.live_bytes
    assert editable.peak == timeline.peak_bytes
    assert editable.extra_time + problem.base_time_ns == pytest.approx(timeline.time_ns)


def random_key(problem: Problem, rng: random.Random) -> int:
    count = len(problem.graph.ops)
    stage = rng.randint(1, count)
    recomputable = [number for number in range(stage) if problem.graph.ops[number].recomputable]
    return stage * count + rng.choice(recomputable or [0])


@pytest.mark.parametrize("seed", range(20))
def test_load_agrees_with_a_simulation_after_every_edit(seed: int) -> None:
    problem, rng = graphs.layered(seed, layers=4), random.Random(seed)
    editable, extra = EditableSchedule(problem), set[int]()
    check(problem, editable)
    for _ in range(40):
        key = random_key(problem, rng)
        if not problem.graph.ops[key % len(problem.graph.ops)].recomputable:
            continue
        if key in extra:
            editable.remove(key)
        else:
            editable.insert(key)
        extra ^= {key}
        check(problem, editable)
        assert editable.extra_steps() == sorted(extra)
    editable.rewind(0)
    check(problem, editable)
    assert editable.extra_steps() == []


def test_knows_which_steps_run_and_are_used() -> None:
    problem = graphs.chain(3)
    editable, count = EditableSchedule(problem), len(problem.graph.ops)
    first_backward = 4
    key = first_backward * count + 1
    assert not editable.runs(key)
    editable.insert(key)
    assert editable.runs(key)
    assert editable.is_used(key)
    useless = (count - 1) * count + 3
    editable.insert(useless)
    assert not editable.is_used(useless)
