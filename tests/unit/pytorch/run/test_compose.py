from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from tests.support.graphs import captured_from, random_schedule
from tests.support.nets import Loss, Stack, batch

from remat.core.problem import Costs, Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.core.simulate import simulate
from remat.core.validate import validate
from remat.pytorch.run.compose import Call, Outside, Passed, Step, compose
from remat.pytorch.run.watching.gaps import Gap, settle


def _call(depth: int) -> Call:
    captured = captured_from(Loss(Stack(depth)), batch())
    count = len(captured.graph.ops)
    return Call(captured, Costs((1.0,) * count, (0,) * count, captured.size_bytes))


@pytest.fixture(scope="module")
def calls() -> tuple[Call, ...]:
    return (_call(1), _call(2), _call(3))


@pytest.fixture(scope="module")
def step(calls: tuple[Call, ...]) -> Step:
    return compose(calls)


def _unlimited(step: Step) -> Problem:
    return Problem(step.graph, step.costs, 2**60)


def test_one_call_stays_as_it_is(calls: tuple[Call, ...]) -> None:
    (call, *_) = calls
    alone = compose([call])
    assert len(alone.graph.ops) == len(call.captured.graph.ops)
    schedule = random_schedule(call.captured, seed=3)
    assert alone.split(alone.tidy(schedule)) == (schedule,)


def test_backwards_run_in_reverse(step: Step) -> None:
    starts = [places[call.captured.boundary] for places, call in zip(step.placed, step.calls, strict=True)]
    assert starts == sorted(starts, reverse=True)
    ends = [places[-1] for places in step.placed]
    assert ends == sorted(ends, reverse=True)


def test_every_op_of_every_call_has_one_place(step: Step) -> None:
    places = [place for own in step.placed for place in own]
    assert len(places) == len(set(places))
    begin = 1
    assert begin + len(places) + len(step.returns) == len(step.graph.ops)


def test_splitting_the_plain_schedule_gives_plain_schedules(step: Step) -> None:
    parts = step.split(step.tidy(plain_schedule(step.graph)))
    assert parts == tuple(plain_schedule(call.captured.graph) for call in step.calls)


@pytest.mark.parametrize("seed", range(20))
def test_tidied_schedules_split_into_valid_ones(step: Step, seed: int) -> None:
    choice = random.Random(seed)
    steps = list(plain_schedule(step.graph).steps)
    for _ in range(25):
        place = choice.randint(1, len(steps))
        candidates = sorted(number for number in set(steps[:place]) if step.graph.ops[number].recomputable)
        if candidates:
            steps.insert(place, choice.choice(candidates))
    tidy = step.tidy(Schedule(tuple(steps)))
    assert sorted(tidy.steps) == sorted(steps)
    validate(_unlimited(step), tidy)
    for call, part in zip(step.calls, step.split(tidy), strict=True):
        validate(Problem(call.captured.graph, call.costs, 2**60), part)


@pytest.mark.parametrize("seed", range(5))
def test_joining_the_parts_gives_the_schedule_they_came_from(step: Step, calls: tuple[Call, ...], seed: int) -> None:
    parts = tuple(random_schedule(call.captured, seed) for call in calls)
    joined = step.join(parts)
    assert step.tidy(joined) == joined
    assert step.split(joined) == parts


def _live_after(step: Step, gap: int, schedule: Schedule) -> int:
    """Bytes in memory when the op after a gap starts."""
    place = schedule.steps.index(step.gaps[gap]) + 1
    made = sum(step.costs.size_bytes[value] for value in step.graph.ops[schedule.steps[place]].outputs)
    return simulate(_unlimited(step), schedule).live_bytes[place] - made


def test_passed_storage_lives_as_long_as_it_was_held(calls: tuple[Call, ...]) -> None:
    size = 1 << 20
    for held in range(5):
        step = compose(calls, Outside((Passed(size, born=0, held=held),)))
        plain = compose(calls)
        for gap in range(4):
            extra = _live_after(step, gap, plain_schedule(step.graph)) - _live_after(
                plain, gap, plain_schedule(plain.graph)
            )
            assert extra == (size if gap < held else 0)


def test_what_was_measured_is_what_the_settled_step_predicts(calls: tuple[Call, ...]) -> None:
    plain = compose(calls)
    order = plain_schedule(plain.graph)
    held = [1000, 3000, 2000, 2000, 500]
    ends = [_live_after(plain, gap, order) + held[gap] for gap in range(5)]
    gaps = [Gap(peak_bytes=end + 4000, end_bytes=end) for end in ends]
    parts = [plain_schedule(call.captured.graph) for call in calls]
    outside = settle(calls, (), 0, gaps, parts)
    settled = compose(calls, outside)
    schedule = settled.join(parts)
    assert [_live_after(settled, gap, schedule) for gap in range(5)] == ends
    live = simulate(_unlimited(settled), schedule).live_bytes
    for op, gap in zip(settled.gaps, gaps, strict=False):
        assert live[schedule.steps.index(op)] >= gap.peak_bytes
