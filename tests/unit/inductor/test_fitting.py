"""Code that fits, corrected by what it needs and refined by what its kernels take; nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from remat.inductor.decide import Decider
from remat.inductor.fitting import Fitter, Fitting, first_goal
from remat.inductor.graph import Known, Needs, Ready
from remat.inductor.kernels.clock import TimedKernel, TimedKernels
from remat.inductor.kernels.text import KernelText
from remat.inductor.model.choose import given
from remat.inductor.model.joint import Half, Joint, JointNode, Kind
from remat.inductor.model.program import MeasuredRates
from remat.pytorch.run.progress import Reporter
from remat.pytorch.run.settings import Settings

SIZE = 8 << 20
LAYERS = 6


def joint_of() -> Joint:
    """Products with a fused op behind each, which backward reads: products cost more than fused ops are thought to."""
    nodes: list[JointNode] = []

    def add(name: str, target: str, kind: Kind, phase: Half, reads: tuple[int, ...], size: int) -> int:
        nodes.append(JointNode(name, target, kind, phase, reads, len(nodes), size, size // 4 or 1, True))
        return len(nodes) - 1

    last, made = add("x", "x", Kind.INPUT, Half.FORWARD, (), 0), []
    for layer in range(LAYERS):
        product = add(f"mm_{layer}", "aten.mm", Kind.ALONE, Half.FORWARD, (last,), SIZE)
        mask = add(f"mask_{layer}", "aten.slow", Kind.SUM, Half.FORWARD, (product,), SIZE // 2)
        last = add(f"relu_{layer}", "aten.relu", Kind.FUSED, Half.FORWARD, (product, mask), SIZE)
        made.append((product, mask, last))
    loss = add("loss", "aten.sum", Kind.SUM, Half.FORWARD, (last,), 4)
    gradient = add("tangents", "tangents", Kind.INPUT, Half.BACKWARD, (), 0)
    for layer, (product, mask, relu) in reversed(list(enumerate(made))):
        gradient = add(f"grad_{layer}", "aten.mm", Kind.ALONE, Half.BACKWARD, (gradient, product, mask, relu), SIZE)
    return Joint(tuple(nodes), frozenset([loss]), frozenset([gradient]))


JOINT = joint_of()
RATES = MeasuredRates(4e3, 100.0, {number: 2e4 for number, node in enumerate(JOINT.nodes) if node.kind is Kind.ALONE})
ALL = frozenset(number for number, node in enumerate(JOINT.nodes) if node.phase is Half.FORWARD and number)
MOST = given(JOINT, RATES, ALL).prediction.peak_bytes


@dataclass
class Graph:
    """Stands for a graph on a GPU: `needs_of` tells what its code needs, `dear` how much dearer some fused ops are."""

    needs_of: Callable[[int, int], int] = lambda attempt, predicted: predicted
    dear: float | None = None
    choices: list[Any] = field(default_factory=list)
    device: Any = field(default_factory=lambda: SimpleNamespace(type="cuda"))
    form: Any = field(default_factory=lambda: SimpleNamespace(chunked=()))
    plain: Any = field(default_factory=lambda: SimpleNamespace(live_peak_bytes=0, resident_bytes=0))
    known: Known = field(default_factory=lambda: Known(JOINT, RATES))

    def compile(self, inputs: Any, decide: Any) -> Ready:
        uncut = SimpleNamespace(joint=JOINT, saved_by_torch=lambda: ALL)
        choice = decide(uncut, self.known.rates).choice
        self.choices.append(choice)
        return Ready(self.known, choice, SimpleNamespace(call=None))

    def needs(self, ready: Ready, workspaces: Any, allowed: int) -> Needs:
        needed = self.needs_of(len(self.choices), ready.choice.prediction.peak_bytes)
        return Needs(needed, needed, None, self._timed(ready) if self.dear and needed <= allowed else None)

    def _timed(self, ready: Ready) -> TimedKernels:
        """As thought, but what is dropped at first is dearer by `dear`."""
        again = [node for node in JOINT.nodes[: 3 * LAYERS + 1] if node.target == "aten.relu"]
        moved = 2 * SIZE + SIZE // 2
        cost = (RATES.kernel_ns + moved / RATES.bytes_per_ns) * self.dear
        saved = {JOINT.nodes[number].name for number in ready.choice.saved if number < len(JOINT.nodes)}
        runs = [1 if node.name in saved else 2 for node in again]
        kernels = (
            TimedKernel(KernelText((node.name,)), cost, times, moved) for node, times in zip(again, runs, strict=True)
        )
        return TimedKernels(tuple(kernels))

    def price(self, factors: Mapping[str, float]) -> None:
        rates = self.known.rates
        self.known = replace(self.known, rates=replace(rates, factors={**rates.factors, **factors}))

    def with_chunks(self, goal: int) -> None:
        return None


@pytest.fixture(autouse=True)
def own_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    kept: dict[str, float] = {}
    monkeypatch.setattr("remat.inductor.fitting.KernelPrices", lambda device: SimpleNamespace(add=kept.update))
    return kept


def fit(graph: Graph, allowed: int) -> Fitting:
    decider = Decider(Settings(None, time_limit_s=0.5, show_progress=False), Reporter(False))
    return Fitter(graph, (), allowed, decider, None).fit(None)  # type: ignore[arg-type]


def test_torchs_cut_is_taken_where_it_just_fits() -> None:
    graph = Graph()
    allowed = MOST + 1
    assert first_goal(graph, allowed) < MOST  # type: ignore[arg-type]
    assert fit(graph, allowed).ready.choice.is_default and len(graph.choices) == 1


def test_torchs_cut_that_does_not_fit_costs_one_attempt_and_no_budget() -> None:
    graph = Graph(lambda attempt, predicted: 2 * MOST if attempt == 1 else predicted)
    found = fit(graph, MOST)
    assert [choice.is_default for choice in graph.choices] == [True, False]
    assert found.needs.steady_bytes > 0.9 * first_goal(graph, MOST)  # type: ignore[arg-type]


def test_code_that_needs_more_is_planned_with_as_much_less() -> None:
    graph = Graph(lambda attempt, predicted: int(1.04 * predicted))
    allowed = int(0.6 * MOST)
    found = fit(graph, allowed)
    assert found.needs.steady_bytes <= allowed
    assert len(graph.choices) <= 2, "the first attempt tells how much"


def test_prices_of_timed_kernels_lead_to_another_plan(own_prices: dict[str, float]) -> None:
    allowed = int(0.7 * MOST)
    plain, priced = Graph(), Graph(dear=8.0)
    before, found = fit(plain, allowed), fit(priced, allowed)
    assert own_prices, "what was learnt is kept"

    def dear_ones(made: Fitting) -> int:
        saved = (number for number in made.ready.choice.saved if number < len(JOINT.nodes))
        return sum(JOINT.nodes[number].target == "aten.relu" for number in saved)

    assert len(priced.choices) == 2 and dear_ones(found) > dear_ones(before)
    assert found.time_ns == pytest.approx(
        found.ready.choice.prediction.alone_ns
        + sum(kernel.times * kernel.time_ns for kernel in found.needs.timed.kernels)
    )


def test_where_prices_are_as_thought_nothing_is_compiled_again() -> None:
    graph = Graph(dear=1.0)
    found = fit(graph, int(0.7 * MOST))
    assert len(graph.choices) == 1
    assert found.ready.choice is graph.choices[0], "what was proven of it stays with it"
    assert graph.known.rates.factors, "what was learnt is there for the next plan"


@pytest.mark.parametrize("compile_s", [0.001, 1e6])
def test_another_plan_is_compiled_where_that_pays_off(compile_s: float) -> None:
    decider = Decider(Settings(None, time_limit_s=0.5, show_progress=False), Reporter(False))
    graph, allowed = Graph(), int(0.8 * MOST)
    fitter = Fitter(graph, (), allowed, decider, None)  # type: ignore[arg-type]
    slow = given(JOINT, RATES, frozenset())
    assert (fitter._faster(slow, allowed, compile_s) is not None) is (compile_s < 1)


@pytest.mark.parametrize(
    ("room", "apart", "leaves"), [(-1, 0.004, True), (-1, 0.006, False), (0, 0.0, False), (0, -0.02, True)]
)
def test_torchs_cut_that_may_not_fit_has_to_be_worth_the_attempt(room: int, apart: float, leaves: bool) -> None:
    default = replace(given(JOINT, RATES, ALL), is_default=True)
    prediction = replace(default.prediction, time_ns=(1 + apart) * default.prediction.time_ns)

    class Settled(Decider):
        def choose(self, *_: Any, **__: Any) -> Any:
            return replace(default, prediction=prediction, is_default=False)

    decider = Settled(Settings(None), Reporter(False))
    assert decider._faster(default, JOINT, RATES, MOST + room).is_default is not leaves
