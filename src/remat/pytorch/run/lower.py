"""A schedule becomes a pair of FX graphs that compute, free and recompute in exactly its order.

In: a `Captured` and a valid `Schedule` of its graph. Out: a `Lowered`: forward takes the graph's inputs and returns
(outputs, saved), backward takes (saved, incoming gradients) and returns gradients. Both take one list and empty it,
so that a tensor dies right after its last use; FX's code generator drops each name there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.fx.node import map_arg

from remat.core.graph import Op, OpId, Transfer, ValueId
from remat.core.schedule import Schedule
from remat.core.simulate import NO_VALUE, overwritten_inputs
from remat.pytorch import rng
from remat.pytorch._compat.fakes import ASK_GRAD_MODE, call_in_grad_mode
from remat.pytorch.graph.capture import Captured, resident_roots
from remat.pytorch.graph.nodes import add_node, waits_for_collective
from remat.pytorch.graph.overwrite import overwritable, overwriting_call
from remat.pytorch.host.steps import arrive, be_gone, begin_back, begin_out
from remat.pytorch.host.store import Store
from remat.pytorch.run.gradients.hand_over import after_readers
from remat.pytorch.run.join import joined_args


class BoxedCodeGen(CodeGen):
    """Functions that take their arguments in one list and empty it: the caller keeps nothing alive."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        names = [name.split(":")[0].split("=")[0].strip() for name in free_vars if name != "self"]
        unpack = f"\n    {', '.join(names)}, = boxed\n    boxed.clear()" if names else ""
        return f"def {self._func_name}(self, boxed){maybe_return_annotation}:{unpack}"


@dataclass(frozen=True, slots=True)
class Lowered:
    """What runs: `forward([*inputs]) -> (outputs, saved)`, `backward([*saved, *tangents]) -> gradients`."""

    schedule: Schedule
    forward_module: GraphModule
    backward_module: GraphModule
    _keeping: Callable[[], GraphModule]

    @property
    def forward(self) -> Callable[[list[Any]], tuple[tuple[Any, ...], tuple[Any, ...]]]:
        return self.forward_module.forward

    @property
    def backward(self) -> Callable[[list[Any]], tuple[Any, ...]]:
        return self.backward_module.forward

    @property
    def backward_keeping(self) -> Callable[[list[Any]], tuple[Any, ...]]:
        """The same without overwriting what forward saved, for a backward that another one will follow."""
        return self._keeping().forward


STORE = "remat_store"
"""The attribute of a lowered module at which values on the host are kept."""


@dataclass(frozen=True, slots=True)
class OnHost:
    """What backward takes over of a value that forward sent to the host."""

    value: ValueId


def lower(
    captured: Captured,
    schedule: Schedule,
    *,
    overwrite: bool = True,
    joined: frozenset[OpId] = frozenset(),
    store: Store | None = None,
) -> Lowered:
    """Emit every step of `schedule` in order, cut in two at the boundary; ops overwrite as `simulate` says.

    Each of `joined`, in backward, runs in one call with the op that follows it. Where the schedule moves values, they
    are kept in `store`.
    """
    schedule = after_readers(captured, schedule)
    cut = _Cut(captured, schedule, overwrite)
    forward, crossing = cut.forward()
    outputs = tuple(forward.emit_argument(item) for item in captured.forward_outputs)
    forward.graph.output((outputs, tuple(map(forward.held, crossing))))
    under_way = frozenset(forward.arriving)

    def backward(kept: frozenset[int]) -> GraphModule:
        emitter = cut.emitter(set(under_way))
        chosen = [NO_VALUE if into in kept else into for into in cut.taken[cut.start :]]
        graph = _emit_backward(emitter, crossing, cut.steps, chosen, joined)
        return _module(captured, graph, "RematBackward", store)

    held = frozenset(base for item in crossing if isinstance(item, Node) and (base := captured.base[item]) is not None)
    module = _module(captured, forward.graph, "RematForward", store)
    return Lowered(schedule, module, backward(frozenset()), cache(partial(backward, held)))


def lower_backward(
    captured: Captured, schedule: Schedule, count: int, *, overwrite: bool = True, joined: frozenset[OpId] = frozenset()
) -> tuple[GraphModule, GraphModule]:
    """The backward of a lowered schedule in two: `count` steps that read no incoming gradient, and the rest.

    The first takes what forward saved; the rest takes what the first returns, and the incoming gradients.
    """
    cut = _Cut(captured, schedule, overwrite)
    _, crossing = cut.forward()
    early = cut.emitter()
    for item in crossing:
        early.take_over(item)
    for number, into in zip(cut.steps[:count], cut.taken[cut.start :], strict=False):
        early.run(number, into)
    between = _crossing(captured, cut.steps[count:], early, captured.inputs())
    early.graph.output(tuple(map(early.held, between)))
    rest = _emit_backward(cut.emitter(), between, cut.steps[count:], cut.taken[cut.start + count :], joined)
    return _module(captured, early.graph, "RematEarly", None), _module(captured, rest, "RematBackward", None)


class _Cut:
    """A schedule that is cut in two at the boundary."""

    def __init__(self, captured: Captured, schedule: Schedule, overwrite: bool) -> None:
        self._captured, self._derived = captured, _derived_nodes(captured)
        self._repeated = set(schedule.recomputed()) & captured.random_ops
        self._before = schedule.steps[: schedule.steps.index(captured.boundary)]
        self.start = len(self._before) + 1
        self.steps = schedule.steps[self.start :]
        """Of backward."""
        self.taken = overwritten_inputs(captured.graph, schedule) if overwrite else [NO_VALUE] * len(schedule.steps)

    def emitter(self, arriving: set[ValueId] | None = None) -> _Emitter:
        return _Emitter(self._captured, self._derived, self._repeated, arriving=arriving or set())

    def forward(self) -> tuple[_Emitter, list[Node | OnHost | OpId]]:
        """All of forward but what it returns, and what crosses to backward."""
        emitter, primals = self.emitter(), self._captured.inputs()
        for node in primals:
            emitter.add_input(node)
        for number, into in zip(self._before, self.taken, strict=False):
            emitter.run(number, into)
        return emitter, _crossing(self._captured, self.steps, emitter, primals)


def _emit_backward(
    emitter: _Emitter,
    crossing: list[Node | OnHost | OpId],
    steps: tuple[OpId, ...],
    taken: list[int],
    joined: frozenset[OpId],
) -> Graph:
    captured = emitter.captured
    for item in crossing:
        emitter.take_over(item)
    for node in captured.tangents():
        emitter.add_input(node)
    waiting: OpId | None = None
    for number, into in zip(steps, taken, strict=True):
        if waiting is not None:
            emitter.run_joined(waiting, number)
            waiting = None
        elif number in joined:
            waiting = number
        else:
            emitter.run(number, into)
    emitter.graph.output(tuple(emitter.emit_argument(item) for item in captured.backward_outputs))
    return emitter.graph


@dataclass(slots=True)
class _Emitter:
    """Writes one FX graph. `env` maps nodes of the joint graph to the newest node that computes them here."""

    captured: Captured
    derived: dict[ValueId, list[Node]]
    repeated_random: set[OpId]
    graph: Graph = field(default_factory=Graph)
    env: dict[Node, Node] = field(default_factory=dict)
    states: dict[OpId, Node] = field(default_factory=dict)
    """Remembered generator states of random ops that run again."""
    tickets: dict[ValueId, Node] = field(default_factory=dict)
    """Of values that are on the host, or on their way there or back."""
    arriving: set[ValueId] = field(default_factory=set)
    """Values whose copies back have begun, which nobody has read yet."""

    def add_input(self, node: Node) -> None:
        self.env[node] = self.graph.placeholder(node.name)

    def take_over(self, item: Node | OnHost | OpId) -> None:
        """What `held` gave of the forward."""
        if isinstance(item, Node):
            self.add_input(item)
        elif isinstance(item, OnHost):
            self.tickets[item.value] = self.graph.placeholder(f"on_host_{item.value}")
        else:
            self.states[item] = self.graph.placeholder(f"rng_{item}")

    def held(self, item: Node | OnHost | OpId) -> Node:
        if isinstance(item, Node):
            return self.env[item]
        return self.tickets[item.value] if isinstance(item, OnHost) else self.states[item]

    def run(self, number: OpId, into: int = NO_VALUE) -> None:
        """Compute one op anew, into the storage of an input if one is given; old versions and views are forgotten."""
        node = self.captured.op_nodes[number]
        if node is None:
            return self._move(number)
        self._await(number)
        args, kwargs = self._emit_arguments(node)
        self._forget(self.captured.graph.ops[number].outputs)
        target: Any = node.target
        if into != NO_VALUE:
            target, args, kwargs = overwriting_call(target, args, kwargs, self.env[self._written(node, into)])
        self.env[node] = self._call(number, target, args, kwargs)
        self._take_apart(node)

    def _written(self, node: Node, into: int) -> Node:
        """The argument that lies on value `into`; of several, the one that can be written to."""
        found = [item for item in node.all_input_nodes if self.captured.base.get(item) == into]
        return found[0] if len(found) == 1 else next(item for item in overwritable(node) if item in found)

    def _forget(self, values: tuple[ValueId, ...]) -> None:
        for value in values:
            self.arriving.discard(value)
            for stale in self.derived.get(value, ()):
                self.env.pop(stale, None)

    def _await(self, number: OpId) -> None:
        """What the op reads has to have arrived."""
        for value in self.captured.graph.ops[number].inputs:
            if value in self.arriving:
                self.arriving.discard(value)
                self.graph.call_function(arrive, (self.tickets[value],))

    def _move(self, number: OpId) -> None:
        """Begin a copy, or wait for one; the boundary, which is no op of the program, moves nothing."""
        op = self.captured.graph.ops[number]
        if op.transfer is None:
            return
        value = op.outputs[0] if op.transfer is Transfer.BACK else op.inputs[0]
        holder = self.captured.value_nodes[value]
        assert holder is not None, "only values that a node holds can move"
        if op.transfer is Transfer.OUT:
            self._await(number)
            self.tickets[value] = self.graph.call_function(begin_out, (self._store(), self.env[holder]))
        elif op.transfer is Transfer.GONE:
            self.graph.call_function(be_gone, (self.tickets[value], self.env[holder]))
        else:
            self._forget(op.outputs)
            self.env[holder] = self.graph.call_function(begin_back, (self._store(), self.tickets[value]))
            self.arriving.add(value)

    def _store(self) -> Node:
        return self.graph.get_attr(STORE)

    def run_joined(self, first: OpId, second: OpId) -> None:
        """Two gradients of one convolution in one call."""
        one, other = self.captured.op_nodes[first], self.captured.op_nodes[second]
        assert one is not None and other is not None, "only ops of the graph are joined"
        self._await(first)
        self._await(second)
        args = tuple(self.emit_argument(arg) for arg in joined_args(one, other))
        self.env[one] = self.env[other] = self.graph.call_function(one.target, args)
        self._take_apart(one)
        self._take_apart(other)

    def _take_apart(self, node: Node) -> None:
        for user in node.users:
            if waits_for_collective(user):
                # At once: until then it holds what it was given, too.
                self.env[user] = self.graph.call_function(user.target, (self.env[node],))
            if user.target is operator.getitem and user in self.captured.base:
                self.env[user] = self.graph.call_function(operator.getitem, (self.env[node], user.args[1]))

    def _call(self, number: OpId, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        if target in ASK_GRAD_MODE:
            target, args = call_in_grad_mode, (target, *args)
        if number not in self.repeated_random:
            return add_node(self.graph, "call_function", target, args, kwargs)
        device_type = self.captured.device.type
        if number in self.states:
            return self.graph.call_function(rng.replay, (self.states[number], target, *args), kwargs)
        self.states[number] = self.graph.call_function(rng.remember, (device_type,))
        return self.graph.call_function(target, args, kwargs)

    def emit_argument(self, argument: Any) -> Any:
        return map_arg(argument, self._emit)

    def _emit_arguments(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = map_arg((node.args, node.kwargs), self._emit)
        return args, kwargs

    def _emit(self, node: Node) -> Any:
        """The newest node for `node`; views and constants are made on the spot."""
        if node in self.env:
            return self.env[node]
        if node.op == "get_attr":
            self.env[node] = self.graph.get_attr(str(node.target))
        elif node.target is operator.getitem and node not in self.captured.base:
            # A member that is no tensor (a size, a flag) is the same at every run.
            return node.meta["val"]
        else:
            args, kwargs = self._emit_arguments(node)
            self.env[node] = add_node(self.graph, "call_function", node.target, args, kwargs)
        return self.env[node]


def _derived_nodes(captured: Captured) -> dict[ValueId, list[Node]]:
    """All nodes that live on each value: its holder and every view of it."""
    result: dict[ValueId, list[Node]] = {}
    for node, value in captured.base.items():
        if value is not None:
            result.setdefault(value, []).append(node)
    return result


def _crossing(
    captured: Captured, steps: tuple[OpId, ...], forward: _Emitter, primals: list[Node]
) -> list[Node | OnHost | OpId]:
    """What backward takes over from forward: values, what is on the host, inputs and generator states."""
    values, resident, states = _needed_by_backward(captured, steps)
    items: list[Node | OnHost | OpId] = []
    for value in values:
        holder = captured.value_nodes[value]
        if holder is None or holder not in forward.env:
            raise AssertionError(f"value {value} crosses the boundary but forward does not hold it")
        items.append(holder)
    items.extend(OnHost(value) for value in _on_host(captured, steps, forward))
    items.extend(node for node in primals if node in resident)
    items.extend(sorted(states & set(forward.states)))
    return items


def _needed_by_backward(captured: Captured, steps: tuple[OpId, ...]) -> tuple[list[ValueId], set[Node], set[OpId]]:
    """Values read before backward computes them, resident nodes read at all, random ops that run again."""
    ops = captured.graph.ops
    made: set[ValueId] = set(ops[captured.boundary].outputs)
    values: dict[ValueId, None] = {}
    resident: set[Node] = set()
    states: set[OpId] = set()
    roots = [node for node in captured.backward_outputs if isinstance(node, Node)]
    for number in steps:
        node = captured.op_nodes[number]
        for value in _values_read(ops[number]):
            if value not in made:
                values[value] = None
        made.update(ops[number].outputs)
        if number in captured.random_ops:
            states.add(number)
        if node is not None:
            resident.update(resident_roots(captured, node.all_input_nodes))
    returned = (captured.base.get(node) for node in roots)
    values.update(dict.fromkeys(value for value in returned if value is not None and value not in made))
    resident.update(resident_roots(captured, roots))
    return list(values), resident, states


def _values_read(op: Op) -> tuple[ValueId, ...]:
    """What an op reads in memory: one that moves a value also reads marks, which are not there."""
    if op.transfer is None:
        return op.inputs
    return () if op.transfer is Transfer.BACK else op.inputs[:1]


def _on_host(captured: Captured, steps: tuple[OpId, ...], forward: _Emitter) -> list[ValueId]:
    """Values whose copies backward waits for or fetches, of those that forward sent."""
    found = dict.fromkeys(sorted(forward.arriving))
    for number in steps:
        op = captured.graph.ops[number]
        if op.transfer in (Transfer.GONE, Transfer.BACK):
            found[op.outputs[0] if op.transfer is Transfer.BACK else op.inputs[0]] = None
    return [value for value in found if value in forward.tickets]


def _module(captured: Captured, graph: Graph, name: str, store: Store | None) -> GraphModule:
    graph.set_codegen(BoxedCodeGen())
    graph.lint()
    targets = (str(node.target) for node in graph.nodes if node.op == "get_attr")
    constants = {target: store if target == STORE else getattr(captured.joint, target) for target in targets}
    return GraphModule(constants, graph, name)
