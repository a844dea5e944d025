from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.support.collectives import Gather, one_rank
from tests.support.graphs import captured_from
from tests.support.nets import Loss, Stack, batch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_map_only

from remat.pytorch.costs import op_costs as module
from remat.pytorch.costs.cost_cache import OpCost
from remat.pytorch.costs.op_costs import costs_of, op_key, profile, real_call
from remat.pytorch.costs.roofline import RATES, roofline_ns
from remat.pytorch.graph.capture import Captured
from remat.pytorch.graph.nodes import is_collective

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def captured() -> Captured:
    return captured_from(Loss(Stack(4)), batch())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counter[str]:
    """How often each op is measured, starting with an empty cache."""
    calls: Counter[str] = Counter()

    def measure(node: Node, device: torch.device, *rest: object) -> OpCost:
        calls[op_key(node)] += 1
        return OpCost(1.0, 0)

    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "_measure", measure)
    return calls


def test_each_distinct_op_is_measured_once(captured: Captured, measured: Counter[str]) -> None:
    profile(captured)
    assert set(measured.values()) == {1}
    assert len(measured) < len(captured.graph.ops) - 1


def test_nothing_is_measured_the_second_time(captured: Captured, measured: Counter[str]) -> None:
    first = profile(captured)
    measured.clear()
    assert profile(captured) == first
    assert not measured


def test_deeper_model_measures_nothing_new(captured: Captured, measured: Counter[str]) -> None:
    profile(captured)
    deeper = captured_from(Loss(Stack(8)), batch())
    # What plain eager calls is measured for "1x", where it could lift the peak.
    measured.clear()
    profile(deeper)
    assert not measured


def test_costs_are_one_for_each_op_and_value(captured: Captured) -> None:
    costs = profile(captured)
    assert len(costs.time_ns) == len(costs.workspace_bytes) == len(captured.graph.ops)
    assert costs.size_bytes == captured.size_bytes
    assert costs.time_ns[captured.boundary] == 0
    assert all(time > 0 for number, time in enumerate(costs.time_ns) if number != captured.boundary)


def test_profiling_leaves_the_generator_alone(
    captured: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    before = torch.get_rng_state()
    profile(captured)
    assert torch.equal(torch.get_rng_state(), before)


def test_op_that_cannot_run_is_estimated_and_reported(
    captured: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(node: Node, *rest: object) -> None:
        raise RuntimeError("not here")

    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "real_call", fail)
    with pytest.warns(UserWarning, match="could not be measured .not here"):
        costs = profile(captured)
    assert min(time for time in costs.time_ns if time) >= RATES["cpu"].launch_ns


def test_collectives_are_estimated_without_a_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: list[str] = []
    make_callable = module.real_call

    def counted(node: Node, *rest: object) -> object:
        called.append(str(node.target))
        return make_callable(node, *rest)

    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "real_call", counted)
    with one_rank():
        captured = captured_from(Loss(Gather()), batch())
        # torch keeps an entry for each collective whose result nobody has waited for.
        unwaited = torch._C._distributed_c10d._get_work_registry_size()
        costs = profile(captured)
        assert torch._C._distributed_c10d._get_work_registry_size() == unwaited
    pairs = zip(captured.op_nodes, costs.time_ns, strict=True)
    collectives = [(node, time_ns) for node, time_ns in pairs if node is not None and is_collective(node)]
    assert {str(node.target).split(".")[1] for node, _ in collectives} == {
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    }
    # Of one rank, nothing is sent.
    assert all(time_ns == 0 for _, time_ns in collectives)
    assert called
    assert not any("c10d" in target for target in called)


def _node(captured: Captured, target: str) -> Node:
    return next(node for node in captured.op_nodes if node is not None and str(node.target) == target)


def test_roofline_knows_arithmetic_from_traffic(captured: Captured) -> None:
    matrix, pointwise = _node(captured, "aten.addmm.default"), _node(captured, "aten.gelu.default")
    for device in (CPU, torch.device("cuda")):
        assert roofline_ns(matrix, device) >= RATES[device.type].launch_ns
        assert roofline_ns(pointwise, device) > RATES[device.type].launch_ns


def test_roofline_grows_with_the_batch(captured: Captured) -> None:
    larger = captured_from(Loss(Stack(1)), batch(rows=4096))
    for target in ("aten.addmm.default", "aten.gelu.default"):
        assert roofline_ns(_node(larger, target), CPU) > roofline_ns(_node(captured, target), CPU)


def test_ops_are_measured_in_their_own_types_inside_the_users_autocast(
    captured: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spaces = []
    for name, is_on in (("plain", False), ("cast", True)):
        monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / name))
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            spaces.append(profile(captured).workspace_bytes)
    assert spaces[0] == spaces[1]


def floats(*shape: int) -> torch.Tensor:
    return torch.empty(shape)


def indices(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("index_put", (floats(1, 49, 32), [indices(49), indices(49)], floats(49, 32))),
        ("index", (floats(8, 1, 32), [None, indices(5)])),
        ("gather", (floats(8, 1), 1, indices(8, 6))),
        ("scatter_add", (floats(1, 49, 32), 0, indices(1, 7, 32), floats(1, 7, 32))),
        ("index_select", (floats(4, 3), -1, indices(9))),
        ("select_backward", (floats(2, 3), [2, 3, 4], 2, -1)),
    ],
)
@pytest.mark.parametrize("fill", list(module.Fill))
def test_made_up_indices_lie_within_what_they_index(name: str, args: tuple[Any, ...], fill: module.Fill) -> None:
    # On CUDA one that does not ends the process.
    graph = Graph()

    def node(tensor: torch.Tensor) -> Node:
        made = graph.placeholder(f"input_{len(graph.nodes)}")
        made.meta["val"] = tensor
        return made

    packet = getattr(torch.ops.aten, name)
    call = graph.call_function(getattr(packet, packet.overloads()[0]), tree_map_only(torch.Tensor, node, args))
    assert module.real_call(call, fill)().isfinite().all()


def test_an_op_with_sizes_left_open_costs_what_it_costs_at_those_of_the_call_and_sets_no_guard() -> None:
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        given = mode.from_tensor(
            torch.zeros(24, 8), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2)
        )
        weight = torch.empty(8, 8)
        open_node, fixed_node = (_product(item, weight) for item in (given, torch.empty(24, 8)))
    assert "24" in op_key(open_node) and op_key(open_node) == op_key(fixed_node)
    for device in (CPU, torch.device("cuda")):
        assert roofline_ns(open_node, device) == roofline_ns(fixed_node, device) > 0
    assert real_call(open_node)().shape == (24, 8)
    guards = len(env.guards)
    known = costs_of({op_key(open_node): open_node}, CPU)
    assert known[op_key(open_node)].time_ns > 0
    assert len(env.guards) == guards, "its sizes are as open as they were"


def _product(left: torch.Tensor, right: torch.Tensor) -> Node:
    graph = Graph()
    inputs = [graph.placeholder(name) for name in ("left", "right")]
    node = graph.call_function(torch.ops.aten.mm.default, tuple(inputs))
    for item, value in zip((*inputs, node), (left, right, left @ right), strict=True):
        item.meta["val"] = value
    return node
