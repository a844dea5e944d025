"""Factors that timed kernels give to the prices of others, and their file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from remat.inductor.kernels.clock import TimedKernel
from remat.inductor.kernels.learned import MOST, KernelPrices, factors_of
from remat.inductor.kernels.text import KernelText
from remat.inductor.model.contract import contract
from remat.inductor.model.joint import Half, Joint, JointNode, Kind
from remat.inductor.model.predict import predict
from remat.inductor.model.program import MeasuredRates

CPU = torch.device("cpu")
SIZE = 4 << 20


def chain() -> Joint:
    """Twice a product, and something fused behind it; the second of them is another op."""
    nodes: list[JointNode] = []

    def add(name: str, target: str, kind: Kind, phase: Half, reads: tuple[int, ...], size: int) -> int:
        nodes.append(JointNode(name, target, kind, phase, reads, len(nodes), size, size // 4 or 1, True))
        return len(nodes) - 1

    x = add("x", "x", Kind.INPUT, Half.FORWARD, (), 0)
    first = add("mm", "aten.mm", Kind.ALONE, Half.FORWARD, (x,), SIZE)
    gelu = add("gelu", "aten.gelu", Kind.FUSED, Half.FORWARD, (first,), SIZE)
    second = add("mm_1", "aten.mm", Kind.ALONE, Half.FORWARD, (gelu,), SIZE)
    relu = add("relu", "aten.relu", Kind.FUSED, Half.FORWARD, (second,), SIZE)
    loss = add("loss", "aten.sum", Kind.SUM, Half.FORWARD, (relu,), 4)
    tangent = add("tangents", "tangents", Kind.INPUT, Half.BACKWARD, (), 0)
    one = add("mm_2", "aten.mm", Kind.ALONE, Half.BACKWARD, (tangent, relu), SIZE)
    end = add("mm_3", "aten.mm", Kind.ALONE, Half.BACKWARD, (one, gelu), SIZE)
    return Joint(tuple(nodes), frozenset([loss]), frozenset([end]))


JOINT = chain()
RATES = MeasuredRates(
    1000.0, 2000.0, {number: 1e5 for number, node in enumerate(JOINT.nodes) if node.kind is Kind.ALONE}
)
THOUGHT_NS = RATES.kernel_ns + 2 * SIZE / RATES.bytes_per_ns


def timed(name: str, time_ns: float, times: int = 1) -> TimedKernel:
    return TimedKernel(KernelText((name,)), time_ns, times, moved_bytes=2 * SIZE)


def test_factors_are_what_was_taken_over_what_was_thought() -> None:
    found = factors_of(JOINT, RATES, [timed("gelu", 3 * THOUGHT_NS), timed("relu", THOUGHT_NS)])
    assert {work.split()[0]: factor for work, factor in found.items()} == pytest.approx(
        {"aten.gelu": 3.0, "aten.relu": 1.0}
    )


def test_kernels_that_do_the_same_count_by_how_often_they_run() -> None:
    (factor,) = factors_of(JOINT, RATES, [timed("gelu", 4 * THOUGHT_NS), timed("gelu", THOUGHT_NS, times=2)]).values()
    assert factor == pytest.approx(2.0)


def test_a_wild_factor_is_bounded_and_unknown_nodes_are_passed_over() -> None:
    assert list(factors_of(JOINT, RATES, [timed("gelu", 1e6 * THOUGHT_NS)]).values()) == [MOST]
    assert factors_of(JOINT, RATES, [timed("nobody", THOUGHT_NS), timed("mm", THOUGHT_NS)]) == {}


def test_predictions_and_problems_cost_by_the_factors() -> None:
    from dataclasses import replace

    dear = replace(RATES, factors=factors_of(JOINT, RATES, [timed("gelu", 3 * THOUGHT_NS)]))
    saved = frozenset(number for number, node in enumerate(JOINT.nodes) if node.name in ("gelu", "relu"))
    added = predict(JOINT, saved, dear).time_ns - predict(JOINT, saved, RATES).time_ns
    assert added == pytest.approx(2 * 2 * SIZE / RATES.bytes_per_ns)
    assert predict(JOINT, saved, dear).alone_ns == 4e5
    cheap, costly = (contract(JOINT, rates).costs.time_ns for rates in (RATES, dear))
    assert sum(costly) > sum(cheap)


def test_what_was_learnt_is_there_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    prices = KernelPrices(CPU)
    assert prices.load() == {}
    prices.add({"aten.gelu 8 32 forward": 1.5})
    KernelPrices(CPU).add({"aten.relu 8 32 forward": 0.5})
    assert prices.load() == {"aten.gelu 8 32 forward": 1.5, "aten.relu 8 32 forward": 0.5}


@pytest.mark.parametrize("factor", [0.0, -1.0, 1e9, "much", None])
def test_damaged_prices_are_learnt_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: object) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    prices = KernelPrices(CPU)
    prices.add({"work": 1.5})
    (path,) = (tmp_path / "kernels").glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "factors": {"work": factor}}))
    with pytest.warns(UserWarning, match="prices of kernels are learnt again"):
        assert prices.load() == {}
