"""Saving more while memory is left."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.joints import joints, rates_of
from tests.unit.inductor.model.test_choose import Model, check_runs, everything, uncut_of

from remat.inductor.model.choose import choose
from remat.inductor.model.fill import _candidates, fill
from remat.inductor.model.joint import Joint
from remat.inductor.model.policies import block_inputs, matmuls
from remat.inductor.model.predict import predict
from remat.inductor.model.split import pruned


@pytest.fixture(scope="module")
def joint() -> Joint:
    return uncut_of(Model(), torch.randn(64, 16)).joint


@given(joints(), st.floats(0.9, 2.0))
@settings(max_examples=150, deadline=None)
def test_a_filled_choice_runs_fits_and_is_no_slower(joint: Joint, share: float) -> None:
    rates, saved = rates_of(joint), block_inputs(joint) | joint.kept
    before = predict(joint, saved, rates)
    budget = int(share * before.peak_bytes)
    filled = fill(joint, rates, saved, budget)
    check_runs(joint, filled)
    if before.peak_bytes > budget:
        assert filled == saved
        return
    after = predict(joint, filled, rates)
    assert after.peak_bytes <= budget and after.time_ns <= before.time_ns


@given(joints(most_layers=4), st.floats(1.0, 2.0))
@settings(max_examples=100, deadline=None)
def test_in_the_end_nothing_that_fits_is_of_use(joint: Joint, share: float) -> None:
    rates, saved = rates_of(joint), block_inputs(joint) | joint.kept
    budget = int(share * predict(joint, saved, rates).peak_bytes)
    filled = fill(joint, rates, saved, budget)
    after = predict(joint, filled, rates)
    for alike in _candidates(joint, rates):
        more = filled.union(*(results for _, results in alike))
        if sum(joint.nodes[number].size_bytes for number in more - filled) <= budget - after.peak_bytes:
            assert predict(joint, more, rates).time_ns >= after.time_ns


def test_with_memory_enough_nothing_is_made_again_that_takes_time(joint: Joint) -> None:
    rates = rates_of(joint)
    most = predict(joint, everything(joint), rates)
    filled = fill(joint, rates, block_inputs(joint) | joint.kept, 2 * most.peak_bytes)
    assert predict(joint, filled, rates).time_ns <= most.time_ns
    assert filled == pruned(joint, filled)


def test_of_the_last_candidate_as_many_blocks_are_saved_as_fit(joint: Joint) -> None:
    rates, start = rates_of(joint), block_inputs(joint) | joint.kept
    least = predict(joint, start, rates).peak_bytes
    most = predict(joint, fill(joint, rates, start, 10 * least), rates).peak_bytes
    taken = [
        predict(joint, fill(joint, rates, start, least + part * (most - least) // 8), rates).time_ns
        for part in range(9)
    ]
    assert taken == sorted(taken, reverse=True)
    assert len(set(taken)) > 4


def test_what_is_done_by_hand_is_filled_before_it_is_compared(joint: Joint) -> None:
    rates = rates_of(joint)
    by_hand = predict(joint, matmuls(joint) | joint.kept, rates)
    choice = choose(joint, rates, by_hand.peak_bytes + 64 * 16 * 4 * 4, time_limit_s=2)
    filled = fill(joint, rates, matmuls(joint) | joint.kept, by_hand.peak_bytes + 64 * 16 * 4 * 4)
    assert choice.prediction.time_ns <= predict(joint, filled, rates).time_ns < by_hand.time_ns


def test_where_not_all_can_be_looked_at_what_promises_most_is(joint: Joint, monkeypatch: pytest.MonkeyPatch) -> None:
    rates, start = rates_of(joint), block_inputs(joint) | joint.kept
    before = predict(joint, start, rates)
    # Matmuls, which run alone, take longest by far.
    most = predict(joint, matmuls(joint) | joint.kept, rates)
    monkeypatch.setattr("remat.inductor.model.fill.MOST_TRIALS", 4)
    assert len(list(_candidates(joint, rates))) > 4
    after = predict(joint, fill(joint, rates, start, 2 * most.peak_bytes), rates)
    assert before.time_ns - after.time_ns > 0.9 * (before.time_ns - most.time_ns) > 0
