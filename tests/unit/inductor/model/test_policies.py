"""What people save by hand, of a joint graph that was made up."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.support.joints import rates_of

from remat.inductor.model.choose import choose
from remat.inductor.model.joint import Half, Joint, JointNode, Kind
from remat.inductor.model.policies import block_inputs, matmuls
from remat.inductor.model.predict import predict


def attention_that_runs_once() -> Joint:
    """It returns what the forward goes on with, and statistics that backward alone reads."""

    def node(
        name: str, kind: Kind, phase: Half, reads: tuple[int, ...], number: int, size: int, **facts: bool
    ) -> JointNode:
        facts = {"recomputable": True, **facts}
        return JointNode(name, f"test.{name}", kind, phase, reads, number, size, max(size // 4, 1), **facts)

    nodes = (
        node("x", Kind.INPUT, Half.FORWARD, (), 0, 0),
        node("attention", Kind.ALONE, Half.FORWARD, (0,), 1, 0, recomputable=False),
        node("out", Kind.ALONE, Half.FORWARD, (1,), 2, 4000, is_part=True),
        node("statistics", Kind.ALONE, Half.FREE, (1,), 3, 400, is_part=True),
        node("loss", Kind.SUM, Half.FORWARD, (2,), 4, 4),
        node("tangents", Kind.INPUT, Half.BACKWARD, (), 5, 0),
        node("gradient", Kind.ALONE, Half.BACKWARD, (5, 2, 3), 6, 4000),
    )
    return Joint(nodes, frozenset([4]), frozenset([6]))


@pytest.mark.parametrize("policy", [block_inputs, matmuls])
def test_all_results_of_what_cannot_run_again_are_saved(policy: object) -> None:
    joint = attention_that_runs_once()
    saved = policy(joint)  # type: ignore[operator]
    assert saved >= {2, 3} and 1 not in saved
    assert predict(joint, saved, rates_of(joint)).peak_bytes >= 4400


def test_such_a_graph_is_planned() -> None:
    joint = attention_that_runs_once()
    assert choose(joint, rates_of(joint), 10**6, time_limit_s=1.0).saved >= {2, 3}
