"""Steps whose graphs are called more than once: one choice for all calls, as fast as the budget allows."""

from __future__ import annotations

from functools import partial
from itertools import pairwise, product

import pytest
from tests.support.joints import rates_of, uncut_of
from torch import nn, randn

from remat.inductor.model.choose import Choice, choose, given, leanest
from remat.inductor.model.compose import Composed, compose
from remat.inductor.model.joint import Joint
from remat.inductor.model.repeated import BOUNDLESS, choose_repeated

CALLS = (0, 1, 1, 1)


@pytest.fixture(scope="module")
def graphs() -> list[Joint]:
    def joint(*layers: nn.Module) -> Joint:
        return uncut_of(nn.Sequential(*layers), randn(64, 32, requires_grad=True)).joint

    first = joint(nn.Linear(32, 32), nn.GELU())
    block = joint(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 32), nn.Tanh())
    return [first, block]


@pytest.fixture(scope="module")
def whole(graphs: list[Joint]) -> Composed:
    called = [graphs[name] for name in CALLS]
    return compose(called, [rates_of(joint) for joint in called])


def together(whole: Composed, saved: dict[int, frozenset[int]]) -> Choice:
    numbers = (whole.places[call][number] for call, name in enumerate(CALLS) for number in saved[name])
    return given(whole.joint, whole.rates, frozenset(numbers))


def repeated(whole: Composed, graphs: list[Joint], budget: int) -> Choice:
    known = [(graphs[name], rates_of(graphs[name])) for name in CALLS]
    return choose_repeated(whole, CALLS, known, budget, partial(choose, time_limit_s=0.5, may_copy=False))


def ends(whole: Composed, graphs: list[Joint]) -> tuple[Choice, Choice]:
    """As lean as it gets, and nothing run again."""
    fast = {name: choose(joint, rates_of(joint), BOUNDLESS).saved for name, joint in enumerate(graphs)}
    return repeated(whole, graphs, 0), together(whole, fast)


@pytest.mark.slow
def test_choices_fit_and_more_memory_is_no_slower(whole: Composed, graphs: list[Joint]) -> None:
    lean, fast = (choice.prediction for choice in ends(whole, graphs))
    assert lean.peak_bytes < fast.peak_bytes and fast.time_ns < lean.time_ns
    times = []
    for quarter in range(5):
        budget = lean.peak_bytes + quarter * (fast.peak_bytes - lean.peak_bytes) // 4
        choice = repeated(whole, graphs, budget)
        assert choice.prediction.peak_bytes <= budget
        times.append(choice.prediction.time_ns)
        parts = [whole.part(call, choice.saved) for call in range(len(CALLS))]
        assert parts[1] == parts[2] == parts[3], "all calls of a graph run under one choice"
    assert all(later <= 1.01 * earlier for earlier, later in pairwise(times))
    assert times[-1] == fast.time_ns and times[2] < lean.time_ns


@pytest.mark.slow
def test_what_a_graph_has_in_memory_anyway_is_not_saved_by_every_call(whole: Composed, graphs: list[Joint]) -> None:
    """A single call may save for nothing what its own backward has in memory at its peak; many calls add up."""
    own = {name: leanest(joint, rates_of(joint), may_copy=False).saved for name, joint in enumerate(graphs)}
    nothing = {name: frozenset[int]() for name in own}
    lean = repeated(whole, graphs, 0).prediction.peak_bytes
    by_themselves, saving_nothing = (together(whole, saved).prediction.peak_bytes for saved in (own, nothing))
    assert lean <= min(by_themselves, saving_nothing)
    assert lean < by_themselves


@pytest.mark.slow
def test_no_pair_of_what_single_graphs_can_do_is_much_faster(whole: Composed, graphs: list[Joint]) -> None:
    lean, fast = (choice.prediction for choice in ends(whole, graphs))
    budget = (lean.peak_bytes + fast.peak_bytes) // 2
    found = repeated(whole, graphs, budget)
    sets = []
    for joint in graphs:
        rates = rates_of(joint)
        least = leanest(joint, rates, may_copy=False)
        most = choose(joint, rates, BOUNDLESS).prediction.peak_bytes
        step = max(1, (most - least.prediction.peak_bytes) // 4)
        goals = range(least.prediction.peak_bytes, most + step, step)
        sets.append(
            {least.saved, *(choose(joint, rates, goal, time_limit_s=2.0, may_copy=False).saved for goal in goals)}
        )
    pairs = [together(whole, dict(enumerate(pair))).prediction for pair in product(*sets)]
    best = min(pair.time_ns for pair in pairs if pair.peak_bytes <= budget)
    assert found.prediction.time_ns <= 1.05 * best
