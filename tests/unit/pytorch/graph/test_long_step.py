"""Steps that repeat a block: what is written for them is what tracing every block finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import remat
from remat.pytorch._compat.dynamo import aot_autograd, dynamo_settings
from remat.pytorch._compat.tracing import backward_outside_autocast
from remat.pytorch.costs.plain_peak import plain_step
from remat.pytorch.costs.repeated_plain import plain_step_of
from remat.pytorch.graph import repeats
from remat.pytorch.graph.long_step import long_step
from remat.pytorch.graph.repeated_joint import joint_difference
from remat.pytorch.graph.repeats import Stretch, find_stretches
from remat.pytorch.run.backend import traced_as_eager

WIDTH, COUNT = 4, 14


class Cells(nn.Module):
    """A recurrence with a cell of torch's, or one that is written out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        made = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "own": nn.Linear}[kind]
        self.cell = made(WIDTH if kind != "own" else 2 * WIDTH, WIDTH)

    def forward(self, sequence: Tensor) -> Tensor:
        hidden = cell = sequence.new_zeros(sequence.shape[1], WIDTH)
        for item in sequence:
            if self.kind == "lstm":
                hidden, cell = self.cell(item, (hidden, cell))
            elif self.kind == "gru":
                hidden = self.cell(item, hidden)
            else:
                hidden = torch.tanh(self.cell(torch.cat((item, hidden), 1))) + hidden
        return hidden.sum()


class Columns(nn.Module):
    """A recurrence over the second dimension of a batch, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        state = None
        for step in range(COUNT):
            state = self.cell(rows[:, step], state)
        assert state is not None
        return state[0].sum()


class Layers(nn.Module):
    """Norm, activation, dropout and a layer around a shortcut, in two widths."""

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH] * COUNT + [2 * WIDTH] * COUNT
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths)
        self.layers = nn.ModuleList(nn.Linear(width, width) for width in widths)
        self.between = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        for number, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            rows = self.between(rows) if number == COUNT else rows
            rows = rows + layer(F.dropout(F.relu(norm(rows)), 0.1))
        return rows.square().mean()


class Stacked(nn.Module):
    """All steps are read at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        found = []
        for _ in range(COUNT):
            rows = torch.tanh(self.layer(rows))
            found.append(rows)
        return torch.stack(found).mean()


class OneOther(nn.Module):
    """A block in the middle is not like the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2 * COUNT))

    def forward(self, rows: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            rows = torch.sigmoid(layer(rows)) if number == COUNT else torch.tanh(layer(rows))
        return rows.sum()


def batch(model: nn.Module, *, needs: bool = False) -> Tensor:
    torch.manual_seed(0)
    sizes = {Cells: (COUNT, 3, WIDTH), Columns: (3, COUNT, WIDTH)}
    return torch.randn(sizes.get(type(model), (6, WIDTH)), requires_grad=needs)


def with_graph(model: nn.Module, item: Tensor, look: Callable[[GraphModule, list[Any]], None]) -> None:
    """Call `look` with the graph that Dynamo captures, while ops are traced as eager runs them."""
    seen: list[int] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        with traced_as_eager(module), backward_outside_autocast():
            look(module, list(inputs))
        seen.append(len(inputs))
        return module.forward

    torch.compiler.reset()
    with dynamo_settings(torch.device("cpu")):
        torch.compile(model, backend=backend, dynamic=False)(item)
    assert len(seen) == 1


def joint_of(module: GraphModule, inputs: list[Any]) -> GraphModule:
    found: list[GraphModule] = []

    class Enough(Exception): ...

    def partition(joint: GraphModule, *_: Any, **options: Any) -> Any:
        found.append(joint)
        raise Enough

    with pytest.raises(Enough):
        aot_autograd(fw_compiler=None, bw_compiler=None, partition_fn=partition)(module, inputs)
    return found[0]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Cells("lstm"),
    "gru": lambda: Cells("gru"),
    "own cell": lambda: Cells("own"),
    "columns": Columns,
    "layers": Layers,
}


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "LEAST", COUNT - 3)


@pytest.mark.parametrize("needs", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MODELS)
def test_the_graph_that_is_written_is_the_one_that_is_traced(name: str, needs: bool) -> None:
    def look(module: GraphModule, inputs: list[Any]) -> None:
        step = long_step(module, inputs)
        assert step is not None
        written, traced = step.graft(joint_of(step.stand_in(), inputs)), joint_of(module, inputs)
        assert joint_difference(written.graph, traced.graph) == ""
        *_, left = written.graph.nodes
        *_, right = traced.graph.nodes
        assert list(map(repr, left.meta["desc"])) == list(map(repr, right.meta["desc"]))
        for one, other in zip(written.graph.nodes, traced.graph.nodes, strict=True):
            assert one.meta.get("nn_module_stack") == other.meta.get("nn_module_stack")
            assert one.meta.get("fwd_nn_module_stack") == other.meta.get("fwd_nn_module_stack")

    model = MODELS[name]()
    with_graph(model, batch(model, needs=needs), look)


@pytest.mark.parametrize("name", MODELS)
def test_plain_memory_of_every_op_is_known_from_a_few_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def counted(module: GraphModule, *rest: Any) -> Any:
        lengths.append(len(module.graph.nodes))
        return plain_step(module, *rest)

    def look(module: GraphModule, inputs: list[Any]) -> None:
        monkeypatch.setattr("remat.pytorch.costs.repeated_plain.plain_step", counted)
        found = plain_step_of(module, inputs, torch.device("cpu"))
        assert found == plain_step(module, inputs, torch.device("cpu"))
        assert len(lengths) == 2 and max(lengths) < len(module.graph.nodes)

    model = MODELS[name]()
    with_graph(model, batch(model), look)


@pytest.mark.parametrize("make", [Stacked, OneOther])
def test_blocks_that_are_not_alike_are_traced(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "LEAST", COUNT + 1 if make is OneOther else COUNT - 3)

    def look(module: GraphModule, inputs: list[Any]) -> None:
        assert long_step(module, inputs) is None
        assert plain_step_of(module, inputs, torch.device("cpu")) == plain_step(module, inputs, torch.device("cpu"))

    model = make()
    with_graph(model, batch(model), look)


def test_the_same_problem_is_solved_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan() -> Any:
        torch.manual_seed(1)
        return remat.plan(Layers(), batch(Layers()), budget="0.9x", time_limit=2)

    written = plan()
    monkeypatch.setattr(repeats, "LEAST", 10**9)
    traced = plan()
    assert written.plain_peak_bytes == traced.plain_peak_bytes
    assert written.problem.costs.size_bytes == traced.problem.costs.size_bytes
    for one, other in zip(written.problem.graph.ops, traced.problem.graph.ops, strict=True):
        assert replace(one, name="") == replace(other, name="")


def test_stretches_are_found_around_what_does_not_repeat() -> None:
    tokens = [*"xy", *("abcb" * 6), *"z", *("de" * 9), "q"]
    assert find_stretches(tokens, 5) == [Stretch(2, 4, 6), Stretch(27, 2, 9)]
    assert find_stretches(tokens, 7) == [Stretch(27, 2, 9)]
    assert find_stretches(list("abcdef"), 2) == []
