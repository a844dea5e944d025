from __future__ import annotations

import random

import pytest
from tests.contract import graphs

from remat.core import Problem, simulate, validate
from remat.solvers.tape import Tape


def check(problem: Problem, tape: Tape) -> None:
    schedule = tape.schedule()
    validate(problem, schedule)
    timeline = simulate(problem, schedule)
    assert tuple(tape.load) == timeline.live_bytes
    assert tape.peak == timeline.peak_bytes
    assert tape.extra_time + problem.base_time_ns == pytest.approx(timeline.time_ns)


def random_key(problem: Problem, rng: random.Random) -> int:
    count = len(problem.graph.ops)
    stage = rng.randint(1, count)
    recomputable = [number for number in range(stage) if problem.graph.ops[number].recomputable]
    return stage * count + rng.choice(recomputable or [0])


@pytest.mark.parametrize("seed", range(20))
def test_load_agrees_with_a_simulation_after_every_edit(seed: int) -> None:
    problem, rng = graphs.layered(seed, layers=4), random.Random(seed)
    tape, extra = Tape(problem), set[int]()
    check(problem, tape)
    for _ in range(40):
        key = random_key(problem, rng)
        if not problem.graph.ops[key % len(problem.graph.ops)].recomputable:
            continue
        if key in extra:
            tape.remove(key)
        else:
            tape.insert(key)
        extra ^= {key}
        check(problem, tape)
        assert tape.extra_steps() == sorted(extra)
    tape.rewind(0)
    check(problem, tape)
    assert tape.extra_steps() == []


def test_knows_which_steps_run_and_are_used() -> None:
    problem = graphs.chain(3)
    tape, count = Tape(problem), len(problem.graph.ops)
    first_backward = 4
    key = first_backward * count + 1
    assert not tape.runs(key)
    tape.insert(key)
    assert tape.runs(key)
    assert tape.is_used(key)
    useless = (count - 1) * count + 3
    tape.insert(useless)
    assert not tape.is_used(useless)
