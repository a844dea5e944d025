"""Small values that backward would make again are saved in place of what they are made from."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.joints import joints, rates_of, uncut_of
from torch import nn

from remat.errors import InfeasibleBudget
from remat.inductor.model.choose import choose
from remat.inductor.model.joint import Half, Joint, Kind
from remat.inductor.model.policies import block_inputs
from remat.inductor.model.predict import predict
from remat.inductor.model.small import with_small
from remat.inductor.model.split import pruned, split

WIDTH, ROWS = 64, 32


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).sin()
        return x.square().sum()


def test_inverse_deviation_is_saved_rather_than_made_again() -> None:
    joint = uncut_of(Normed(), torch.randn(ROWS, WIDTH)).joint
    saved = pruned(joint, block_inputs(joint))
    found = with_small(joint, saved, ROWS * 4)
    targets = [joint.nodes[number].target for number in found - saved]
    assert any("rsqrt" in target for target in targets)
    assert not any("rsqrt" in joint.nodes[number].target for number in split(joint, found).backward)


def made_again(joint: Joint, saved: frozenset[int], most_bytes: int) -> set[int]:
    """Small values of the forward that backward runs again for something larger."""
    again = split(joint, saved).backward
    small = {
        number
        for number in again
        if 0 < joint.nodes[number].size_bytes <= most_bytes
        and joint.nodes[number].kind in (Kind.FUSED, Kind.SUM)
        and joint.nodes[number].phase is Half.FORWARD
        and joint.nodes[number].recomputable
    }
    return {read for number in again if number not in small for read in joint.nodes[number].reads} & small


@settings(deadline=None)
@given(joints(), st.data())
def test_no_small_value_is_made_again_for_a_larger_one(joint: Joint, data: st.DataObject) -> None:
    most = data.draw(st.sampled_from([0, 300, 1000, 5000]))
    forward = [number for number, node in enumerate(joint.nodes) if node.phase is Half.FORWARD and node.reads]
    saved = pruned(joint, frozenset(data.draw(st.sets(st.sampled_from(forward)))))
    found = with_small(joint, saved, most)
    assert not made_again(joint, found, most)
    assert all(joint.nodes[number].size_bytes <= most for number in found - saved)


@settings(deadline=None, max_examples=20)
@given(joints(), st.floats(0.5, 1.5))
def test_a_choice_stays_within_its_budget(joint: Joint, share: float) -> None:
    rates = rates_of(joint)
    plain = choose(joint, rates, 10**9, time_limit_s=1.0)
    budget = int(share * plain.prediction.peak_bytes)
    try:
        choice = choose(joint, rates, budget, time_limit_s=1.0)
    except InfeasibleBudget as refused:
        assert refused.min_budget > budget
        return
    assert choice.prediction.peak_bytes <= budget
    if choice.unrolled is None:
        assert predict(joint, choice.saved, rates).peak_bytes <= budget
