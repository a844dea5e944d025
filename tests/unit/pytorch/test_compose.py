from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from tests.support.graphs import captured_from, random_schedule
from tests.support.nets import Loss, Stack, batch

from remat.core.problem import Costs, Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.core.validate import validate
from remat.pytorch.compose import Call, Step, compose


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
    assert len(places) + len(step.returns) == len(step.graph.ops)


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
