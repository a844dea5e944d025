"""What was measured between graphs is given back to the byte."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from tests.support.graphs import captured_from
from tests.support.nets import Loss, Stack, batch

from remat.core.problem import Costs, Problem
from remat.core.schedule import plain_schedule
from remat.core.simulate import simulate
from remat.pytorch.run.compose import BEFORE, Call, Outside, Passed, compose
from remat.pytorch.run.watching.gaps import Gap, level_bytes, settle


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    found = []
    for depth in (1, 2):
        captured = captured_from(Loss(Stack(depth)), batch())
        count = len(captured.graph.ops)
        found.append(Call(captured, Costs((1.0,) * count, (0,) * count, captured.size_bytes)))
    return found


def gaps_of(calls: list[Call], outside: Outside) -> list[Gap]:
    """What a meter would read between the graphs of a plain step whose caller does `outside`."""
    step = compose(calls, outside)
    schedule = plain_schedule(step.graph)
    timeline = simulate(Problem(step.graph, step.costs, budget_bytes=0), schedule)
    found = []
    size = step.costs.size_bytes
    for gap in step.gaps:
        place = schedule.steps.index(gap)
        if place + 1 == len(schedule.steps):
            end = sum(size[value] for value in step.graph.outputs)
        else:
            new = sum(size[value] for value in step.graph.ops[schedule.steps[place + 1]].outputs)
            end = timeline.live_bytes[place + 1] - new
        found.append(Gap(timeline.live_bytes[place], end))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_peak_of_every_gap_is_predicted_as_it_was_measured(calls: list[Call], seed: int) -> None:
    choose, count = random.Random(seed), 2 * len(calls)
    held = [
        Passed(choose.randrange(1, 5000), born=born, held=choose.randrange(born + 1, count))
        for born in (choose.randrange(BEFORE, count - 1) for _ in range(3))
    ]
    truth = Outside(tuple(held), tuple(choose.randrange(3000) for _ in range(count)))
    measured = gaps_of(calls, truth)
    before = sum(item.size_bytes for item in held if item.born == BEFORE)
    schedules = [plain_schedule(call.captured.graph) for call in calls]
    # The meter starts with what the step has made before its first graph.
    relative = [Gap(gap.peak_bytes - before, gap.end_bytes - before) for gap in measured]
    found = settle(calls, [], before, relative, schedules)
    assert [gap.peak_bytes for gap in gaps_of(calls, found)] == [gap.peak_bytes for gap in measured]


def test_level_is_what_the_caller_made_and_still_holds() -> None:
    outside = Outside(
        (Passed(100, born=0, held=2), Passed(10, born=1, held=3), Passed(1, born=0, held=3, source=(0, 0)))
    )
    assert [level_bytes(outside, gap) for gap in range(4)] == [100, 110, 10, 0]


def test_where_gaps_end_early_the_last_level_is_taken_to_stay(calls: list[Call]) -> None:
    truth = Outside((Passed(700, born=0, held=3),), (0, 0, 0, 0))
    schedules = [plain_schedule(call.captured.graph) for call in calls]
    found = settle(calls, [], 0, gaps_of(calls, truth)[:1], schedules)
    assert level_bytes(found, 0) == 700
    assert level_bytes(found, 2) == 700


class Updating(torch.nn.Module):
    """Changes what comes in, which gradients do not need."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.neg_()
        return torch.relu(self.layer(x + 1))


def test_what_dies_before_the_callers_code_is_not_taken_to_be_beside_it() -> None:
    captured = captured_from(Updating(), torch.randn(16, 8))
    costs = Costs(*((0,) * len(captured.graph.ops) for _ in range(2)), captured.size_bytes)
    call, schedule = Call(captured, costs), plain_schedule(captured.graph)
    live = gaps_of([call], Outside((), (0, 0)))[0].peak_bytes
    update = 16 * 8 * 4
    # The caller needs 1,000 bytes when the copied update is gone.
    measured = [Gap(live - update + 1000, live - update), Gap(0, 0)]
    assert settle([call], [], 0, measured, [schedule]).workspace_bytes[0] == 1000
