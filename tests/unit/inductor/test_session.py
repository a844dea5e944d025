"""The life of compiled graphs and what their session does with them; what stands for Inductor compiles nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.support.joints import rates_of
from torch.fx import Graph, GraphModule

from remat.core.budget import Budget, BudgetUnit
from remat.core.results.profile import Phase
from remat.errors import InfeasibleBudget
from remat.inductor.dry_run.timeline import CannotFollow, KernelCall, KernelTimeline
from remat.inductor.fitting import CORRECTIONS
from remat.inductor.graph import ChosenCut, CompiledGraph, Form, Ready, Traced, Unplanned, Untraced
from remat.inductor.loss.rewrite import Rewritten
from remat.inductor.model.choose import given, leanest
from remat.inductor.model.joint import Half, Joint, JointNode, Kind
from remat.inductor.partition import Cut, Instead
from remat.inductor.session import CompiledSession
from remat.pytorch.costs.plain_peak import PlainStep
from remat.pytorch.costs.plain_watch import PlainOp
from remat.pytorch.resident.memory import ResidentMemory
from remat.pytorch.run.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore:What your code needs between the compiled forward and its backward")

CPU = torch.device("cpu")
X = torch.ones(2)
LAYERS, LAYER_BYTES = 4, 1 << 20


def chain() -> Joint:
    """Layers that run alone, a loss, and a backward that reads every layer."""
    nodes: list[JointNode] = []

    def add(name: str, kind: Kind, phase: Half, reads: tuple[int, ...], size: int) -> int:
        nodes.append(JointNode(name, f"test.{name}", kind, phase, reads, len(nodes), size, max(size // 4, 1), True))
        return len(nodes) - 1

    layers = [add("input", Kind.INPUT, Half.FORWARD, (), 0)]
    for number in range(LAYERS):
        layers.append(add(f"layer_{number}", Kind.ALONE, Half.FORWARD, (layers[-1],), LAYER_BYTES))
    loss = add("loss", Kind.SUM, Half.FORWARD, (layers[-1],), 4)
    gradient = add("tangents", Kind.INPUT, Half.BACKWARD, (), 0)
    for layer in reversed(layers[1:]):
        gradient = add(f"grad_{layer}", Kind.ALONE, Half.BACKWARD, (gradient, layer), LAYER_BYTES)
    return Joint(tuple(nodes), frozenset([loss]), frozenset([gradient]))


JOINT = chain()
RATES = rates_of(JOINT)
KEPT = frozenset(range(1, LAYERS + 1))
MOST = given(JOINT, RATES, KEPT).prediction.peak_bytes
LEAST = leanest(JOINT, RATES).prediction.peak_bytes


@dataclass
class Inductor:
    """Asks for a cut as Inductor does, and tells what its code would need: as predicted, times `factor`."""

    factor: Callable[[int], float] = lambda count: 1.0
    """By the number of times that it has compiled."""
    decisions: list[Cut | Instead] = field(default_factory=list)
    forms: list[GraphModule] = field(default_factory=list)
    measured: int = 0

    def build(self, module: GraphModule, inputs: Any, decide: Any, *_: Any) -> Any:
        uncut = SimpleNamespace(joint=JOINT, nodes=(), saved_by_torch=lambda: KEPT)
        decision = decide(uncut)
        self.decisions.append(decision)
        self.forms.append(module)
        if decision is Instead.NOTHING:
            return None
        saved = decision.saved if isinstance(decision, Cut) else KEPT
        need = int(given(JOINT, RATES, saved).prediction.peak_bytes * self.factor(len(self.decisions)))
        call = KernelCall("kernel", Phase.FORWARD, 1, (), 0, 0, need)
        timeline = KernelTimeline((call,), need, 0, 0, 0, 0, 0, ())
        number = len(self.decisions)
        return SimpleNamespace(call=lambda *inputs: number, timeline=lambda *_: timeline, away_bytes=0)

    def measure(self, *_: Any) -> Any:
        self.measured += 1
        return RATES


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> Inductor:
    stand_in = Inductor()
    monkeypatch.setattr("remat.inductor.graph.build", stand_in.build)
    monkeypatch.setattr("remat.inductor.graph.measure_rates", stand_in.measure)
    return stand_in


def module_of_one_output(numel: int) -> GraphModule:
    graph = Graph()
    node = graph.call_function(torch.sin, (graph.placeholder("x"),))
    node.meta["example_value"] = torch.zeros(numel, requires_grad=True)
    graph.output((node,))
    return GraphModule({}, graph)


def session_of(budget_bytes: int, graphs: int = 1) -> CompiledSession:
    """A step of one graph that returns a loss, or of several that break off."""
    budget = Budget(budget_bytes, BudgetUnit.BYTES)
    session = CompiledSession(Settings(budget, time_limit_s=0.3, show_progress=False), ResidentMemory())
    plain = PlainStep((PlainOp("", MOST, 0),), 0, 0)
    for _ in range(graphs):
        session.add_graph(module_of_one_output(1 if graphs == 1 else 4), plain, CPU, alone=graphs == 1)
    return session


def step(session: CompiledSession) -> list[Any]:
    session.begin_call((), {})
    results = [graph(X) for graph in session.graphs]
    session.end_call()
    return results


@pytest.fixture
def whole() -> Iterator[tuple[CompiledSession, CompiledGraph]]:
    session = session_of((MOST + LEAST) // 2)
    yield session, session.graphs[0]


def test_a_whole_step_is_planned_when_it_is_first_called(inductor: Inductor, whole: Any) -> None:
    session, graph = whole
    assert graph.state == Untraced() and session.plan is None
    assert step(session) == [1]
    assert isinstance(graph.state, Ready) and graph.state.is_planned
    assert session.planned == (0,)
    plan = session.plan
    assert plan is not None and plan.compiled is not None and not plan.compiled.is_default
    assert plan.predicted_peak == plan.compiled.peak_bytes <= plan.budget_bytes


def test_what_is_ready_is_not_compiled_again(inductor: Inductor, whole: Any) -> None:
    session, graph = whole
    step(session)
    before = graph.state
    assert step(session) == [1]
    assert graph.state is before and len(inductor.decisions) == 1


def captured_again(session: CompiledSession, graph: CompiledGraph) -> CompiledGraph:
    return session.add_graph(module_of_one_output(1), graph.plain, CPU, alone=True)


def test_a_graph_that_is_captured_again_takes_the_code_that_is_there(inductor: Inductor, whole: Any) -> None:
    session, graph = whole
    step(session)
    again = captured_again(session, graph)
    plan = session.plan
    session.begin_call((), {})
    assert again(X.clone()) == 1
    assert len(inductor.decisions) == 1 and again.state is graph.state
    assert session.planned == (1,) and session.plan is plan
    session.set_budget(Budget(2 * MOST, BudgetUnit.BYTES))
    session.begin_call((), {})
    assert again(X) == 2, "another budget is planned for"


def test_a_graph_that_is_captured_a_third_time_takes_what_was_planned_last(inductor: Inductor, whole: Any) -> None:
    session, first = whole
    step(session)
    second = captured_again(session, first)
    session.begin_call((), {})
    second(X)
    session._plan_next((1,))
    session.begin_call((), {})
    assert second(X) == 2, "planned anew, as for gradients that are added to"
    third = captured_again(session, first)
    session.begin_call((), {})
    assert third(X) == 2 and third.state is second.state is not first.state


@pytest.mark.parametrize("change", ["autocast", "shape", "tied", "requires_grad"])
def test_a_graph_that_differs_in_what_it_is_given_or_in_how_torch_is_set_is_compiled(
    change: str, inductor: Inductor, whole: Any
) -> None:
    session, graph = whole
    session.begin_call((), {})
    graph(X, X.clone())
    again = captured_again(session, graph)
    other = {"shape": torch.ones(3), "requires_grad": X.clone().requires_grad_()}.get(change, X.clone())
    session.begin_call((), {})
    with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
        assert again(X, X if change == "tied" else other) == 2


def test_torchs_own_cut_stays_where_it_fits(inductor: Inductor) -> None:
    session = session_of(2 * MOST)
    step(session)
    assert inductor.decisions == [Instead.TORCHS_CUT]
    assert session.plan is not None and session.plan.compiled is not None and session.plan.compiled.is_default
    state = session.graphs[0].state
    assert isinstance(state, Ready) and state.known.saved_by_torch == KEPT


def test_code_that_needs_more_than_predicted_is_corrected(inductor: Inductor, whole: Any) -> None:
    session, graph = whole
    inductor.factor = lambda count: 1.04 if count == 1 else 1.0
    assert step(session) == [2]
    assert len(inductor.decisions) == 2 and inductor.measured == 1
    assert isinstance(graph.state, Ready) and graph.state.is_planned


def test_code_over_the_budget_never_runs(inductor: Inductor) -> None:
    session = session_of(MOST - 1)
    (graph,) = session.graphs
    inductor.factor = lambda count: 3.0
    for attempt in (1, 2):
        with pytest.raises(InfeasibleBudget, match="that the compiled step needs at least") as refused:
            step(session)
        lean = given(JOINT, RATES, leanest(JOINT, RATES).saved).prediction.peak_bytes
        assert refused.value.min_budget == 3 * lean, "as much as the leanest code was seen to need"
        session.abandon_call()
        assert isinstance(graph.state, Traced) and session.plan is None
        assert len(inductor.decisions) == attempt * (CORRECTIONS + 1) and inductor.measured == 1


def test_a_peak_that_cannot_be_followed_is_taken_as_predicted(
    inductor: Inductor, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, graph = whole
    build = inductor.build

    def fail(*_: Any) -> None:
        raise CannotFollow("no source")

    def unfollowed(*args: Any) -> Any:
        return SimpleNamespace(call=build(*args).call, timeline=fail, away_bytes=0)

    monkeypatch.setattr("remat.inductor.graph.build", unfollowed)
    with pytest.warns(UserWarning, match="only estimated: no source"):
        step(session)
    assert session.plan is not None and isinstance(graph.state, Ready)
    assert session.plan.predicted_peak == graph.state.choice.prediction.peak_bytes


def test_training_that_has_begun_goes_on_with_the_leanest_code(
    inductor: Inductor, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, graph = whole
    step(session)
    monkeypatch.setattr(CompiledSession, "_resident_bytes", lambda self, device: MOST)
    session._plan_next((0,))
    with pytest.warns(UserWarning, match="goes on with the leanest plan known"):
        step(session)
    assert isinstance(graph.state, Ready)
    assert graph.state.choice.prediction.peak_bytes == LEAST


def test_another_budget_drops_the_code_and_keeps_what_is_known(inductor: Inductor, whole: Any) -> None:
    session, graph = whole
    step(session)
    known = graph.known
    session.set_budget(Budget(2 * MOST, BudgetUnit.BYTES))
    assert graph.state == Traced(known)
    step(session)
    assert inductor.measured == 1 and inductor.decisions[-1] is Instead.TORCHS_CUT
    assert session.plan is not None and session.plan.budget_bytes == 2 * MOST


def test_a_loss_in_chunks_is_another_form_of_which_nothing_is_known(
    inductor: Inductor, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, graph = whole
    region: Any = None
    monkeypatch.setattr("remat.inductor.graph.rewrite_loss", lambda module, count: [Rewritten(region, 2)])
    step(session)
    first, second = inductor.decisions
    assert first is Instead.NOTHING and isinstance(second, Cut), "the first form is dropped without being compiled"
    assert inductor.forms[0] is graph.module and inductor.forms[1] is graph.form.module is not graph.module
    assert inductor.measured == 2
    assert session.plan is not None and session.plan.compiled is not None
    assert session.plan.compiled.loss_chunks == (2,)
    other = graph.other_form(MOST)
    assert other is not None and other.module is graph.module and not other.chunked


def test_several_graphs_get_by_until_they_are_planned_together(inductor: Inductor) -> None:
    session = session_of(2 * MOST, graphs=2)
    step(session)
    states = [graph.state for graph in session.graphs]
    assert all(isinstance(state, Ready) and not state.is_planned for state in states) and session.plan is None
    session.begin_call((), {})
    assert all(isinstance(graph.state, Traced) for graph in session.graphs)
    session.enter(session.graphs[0], (X,))
    assert isinstance(session.graphs[0].state, Ready) and session.graphs[0].state.is_planned
    assert isinstance(session.graphs[1].state, ChosenCut) and session.plan is not None
    session.enter(session.graphs[1], (X,))
    session.end_call()
    assert isinstance(session.graphs[1].state, Ready) and session.graphs[1].state.is_planned
    assert session.planned == (0, 1)
    count = len(inductor.decisions)
    step(session)
    assert len(inductor.decisions) == count


def test_several_graphs_that_do_not_fit_run_as_lean_as_they_can(inductor: Inductor) -> None:
    session = session_of(LEAST, graphs=2)
    step(session)
    with pytest.warns(UserWarning, match="goes on with the leanest plan known, .* over its budget"):
        step(session)
    assert all(isinstance(graph.state, Ready) and graph.state.is_planned for graph in session.graphs)
    assert session.plan is not None and session.plan.predicted_peak > session.plan.budget_bytes


def test_steps_that_nothing_leaner_is_known_for_are_planned_once(
    inductor: Inductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that tells peaks each of them is seen to exceed the budget."""
    session = session_of(LEAST, graphs=2)
    monkeypatch.setattr("remat.inductor.session.PeakCheck.is_exceeded", lambda _, allowed: allowed < 3 * MOST)
    step(session)
    with pytest.warns(UserWarning, match="goes on with the leanest plan known"):
        step(session)
    count = len(inductor.decisions)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            step(session)
    assert len(inductor.decisions) == count
    session.set_budget(Budget(4 * MOST, BudgetUnit.BYTES))
    for _ in range(2):
        step(session)
    assert len(inductor.decisions) > count and session.plan is not None
    assert session.plan.predicted_peak <= session.plan.budget_bytes


def test_what_is_not_counted_between_forward_and_backward_is_said(inductor: Inductor) -> None:
    session = session_of(2 * MOST, graphs=2)
    step(session)
    with pytest.warns(UserWarning, match="a loss outside, is not counted on the CPU"):
        step(session)


def test_what_cannot_be_compiled_runs_unplanned_from_then_on(
    inductor: Inductor, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, graph = whole
    monkeypatch.setattr("remat.inductor.graph.build", lambda *_: 1 / 0)
    monkeypatch.setattr("remat.inductor.graph.build_plainly", lambda module, inputs: lambda *_: "plain")
    with pytest.warns(UserWarning, match="ZeroDivisionError.*it runs as torch.compile runs it"):
        assert step(session) == ["plain"]
    session.set_budget(Budget(2 * MOST, BudgetUnit.BYTES))
    assert isinstance(graph.state, Unplanned) and step(session) == ["plain"]


def test_a_graph_without_backward_runs_as_it_is_and_the_others_are_planned(
    inductor: Inductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(2 * MOST, graphs=2)
    first, second = session.graphs

    def build(module: GraphModule, *rest: Any) -> Any:
        return SimpleNamespace(call=lambda *_: "as it is") if module is first.module else inductor.build(module, *rest)

    monkeypatch.setattr("remat.inductor.graph.build", build)
    for _ in range(2):
        assert step(session)[0] == "as it is"
    assert isinstance(first.state, Unplanned) and isinstance(second.state, Ready)
    assert second.state.is_planned and session.planned == (1,)


def test_gradients_that_are_added_to_are_planned_for_once_they_are_seen(
    inductor: Inductor, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, graph = whole
    step(session)
    monkeypatch.setattr(ResidentMemory, "has_gradients", lambda self: True)
    session.begin_call((), {})
    assert isinstance(graph.state, Traced) and session.accumulates
    session.end_call()
    step(session)
    before = graph.state
    step(session)
    assert isinstance(before, Ready) and graph.state is before


def test_a_step_that_raised_says_nothing_of_the_next(inductor: Inductor) -> None:
    session = session_of(2 * MOST, graphs=2)
    session.begin_call((), {})
    session.graphs[0](X)
    session.abandon_call()
    assert session.calls == [] and not session.is_under_way()
    before = session.graphs[0].state
    session.begin_call((), {})
    assert session.graphs[0].state is before and isinstance(before, Ready)


def test_states_cannot_be_changed_and_forms_are_told_apart(inductor: Inductor, whole: Any) -> None:
    session, graph = whole
    step(session)
    with pytest.raises(AttributeError):
        graph.state.is_planned = False
    assert Form(graph.module) != Form(graph.module), "a form is itself alone"
