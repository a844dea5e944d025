"""Problems as files: the small `remat-instance` format and the general `remat-problem` format.

An instance is a list of nodes, each an op with exactly one output value, so that node position, op id and value id
are the same number. A problem file also knows ops with several outputs, workspace, resident bytes and ops that must
run once: what a capture gives. Both are checked on load; an empty list of nodes is allowed and has an empty schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from remat.core.copies import Movable, has_copies, movable_of, with_copies, without_copies
from remat.core.document import Record, read_document, write_document
from remat.core.graph import Graph, Op, ValueId
from remat.core.problem import LARGEST_BYTES, Costs, Problem
from remat.errors import FileFormatError, InvalidGraph

INSTANCE_FORMAT, PROBLEM_FORMAT = "remat-instance", "remat-problem"
VERSIONS = {INSTANCE_FORMAT: 2, PROBLEM_FORMAT: 3}
"""The newest, which are written; earlier ones, which knew no copies to the host, are read too."""
MAX_OPS, MAX_READS = 50_000, 500_000
"""Problems of more ops, or of ops with more inputs together, are refused: no time limit could be kept for them."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A problem that still lacks a budget."""

    name: str
    graph: Graph
    costs: Costs
    host_budget_bytes: int = LARGEST_BYTES

    def with_budget(self, budget_bytes: int) -> Problem:
        return Problem(self.graph, self.costs, budget_bytes, host_budget_bytes=self.host_budget_bytes)


def load_instance(path: Path) -> Instance:
    """Read a `remat-instance` file; times keep the type they have in the file."""
    return _decode_instance(read_document(path, {INSTANCE_FORMAT: VERSIONS[INSTANCE_FORMAT]}))


def save_instance(instance: Instance, path: Path) -> None:
    """Write a `remat-instance` file; only graphs whose ops have one output each, in order, can be written."""
    whole = instance.with_budget(LARGEST_BYTES)
    graph, costs = without_copies(whole).graph, without_copies(whole).costs
    if any(op.outputs != (number,) for number, op in enumerate(graph.ops)) or any(costs.workspace_bytes):
        raise InvalidGraph("An instance file holds ops with one output and no workspace; use save_problem instead.")
    nodes = [
        {"name": op.name, "time": time, "bytes": size, "inputs": list(op.inputs), "backward": op.backward}
        for op, time, size in zip(graph.ops, costs.time_ns, costs.size_bytes, strict=True)
    ]
    head = {"format": INSTANCE_FORMAT, "version": VERSIONS[INSTANCE_FORMAT], "name": instance.name}
    write_document(path, {**head, "nodes": nodes, "outputs": list(graph.outputs), **_encode_copies(whole)})


def load_problem(path: Path) -> Problem:
    """Read either format; a file that states no budget gives a problem with no limit (see `with_budget`)."""
    return decode_either(read_document(path, VERSIONS))


def decode_either(record: Record) -> Problem:
    """The problem of a file of either format, which was read already; one that is too large to be solved is refused."""
    is_instance = record.text("format") == INSTANCE_FORMAT
    _check_count(record, "nodes" if is_instance else "ops")
    if is_instance:
        return _decode_instance(record).with_budget(LARGEST_BYTES)
    return decode_problem(record)


def _check_count(record: Record, key: str) -> None:
    found = record.items(key)
    inputs = (item.get("inputs") for item in found if isinstance(item, dict))
    reads = sum(len(item) for item in inputs if isinstance(item, list))
    for count, limit, what in ((len(found), MAX_OPS, key), (reads, MAX_READS, "inputs of all of them together")):
        if count > limit:
            raise FileFormatError(
                f"{record.where} is too large: it has {count} {what}, and problems of up to {limit} are solved; "
                "state it in fewer parts."
            )


def save_problem(problem: Problem, path: Path) -> None:
    head = {"format": PROBLEM_FORMAT, "version": VERSIONS[PROBLEM_FORMAT]}
    write_document(path, {**head, **encode_problem(problem)})


def encode_problem(problem: Problem) -> dict[str, object]:
    """The fields of a problem, as they stand in problem files and inside plan files."""
    graph, costs = without_copies(problem).graph, without_copies(problem).costs
    rows = zip(graph.ops, costs.time_ns, costs.workspace_bytes, strict=True)
    return {
        "name": graph.name,
        "ops": [_encode_op(op, time, workspace) for op, time, workspace in rows],
        "sizes": list(costs.size_bytes),
        "outputs": list(graph.outputs),
        "resident_bytes": problem.resident_bytes,
        "budget_bytes": problem.budget_bytes,
        **_encode_copies(problem),
    }


def _encode_copies(problem: Problem) -> dict[str, object]:
    """Values that may leave the device: nothing where none may."""
    if not has_copies(problem.graph):
        return {}
    return {
        "copies": [
            {"value": item.value, "out": item.out_ns, "back": item.back_ns, "beside": item.is_beside}
            for item in movable_of(problem)
        ],
        "host_budget_bytes": problem.host_budget_bytes,
    }


def _decode_copies(record: Record, problem: Problem) -> Problem:
    if "copies" not in record.fields:
        return problem
    movable = [
        Movable(ValueId(row.integer("value")), row.number("out"), row.number("back"), row.flag("beside", True))
        for row in record.records("copies")
    ]
    host = record.integer("host_budget_bytes", LARGEST_BYTES)
    return with_copies(replace(problem, host_budget_bytes=host), movable)


def decode_problem(record: Record) -> Problem:
    ops = record.records("ops")
    costs = Costs(
        time_ns=tuple(op.number("time") for op in ops),
        workspace_bytes=tuple(op.signed("workspace", 0) for op in ops),
        size_bytes=record.integers("sizes"),
    )
    try:
        graph = Graph(
            ops=tuple(_decode_op(op) for op in ops),
            value_count=len(costs.size_bytes),
            outputs=_values(record.integers("outputs")),
            name=record.text("name", ""),
        )
        resident = record.integer("resident_bytes", 0)
        budget = record.integer("budget_bytes", LARGEST_BYTES)
        return _decode_copies(record, Problem(graph, costs, budget, resident))
    except InvalidGraph as error:
        raise FileFormatError(f"{record.where}: {error}") from error


def _encode_op(op: Op, time: float, workspace: int) -> Mapping[str, object]:
    return {
        "name": op.name,
        "inputs": list(op.inputs),
        "outputs": list(op.outputs),
        "backward": op.backward,
        "recomputable": op.recomputable,
        "target": op.target,
        "module": op.module,
        "time": time,
        "workspace": workspace,
        **({"overwrites": list(op.overwrites)} if op.overwrites else {}),
    }


def _decode_op(record: Record) -> Op:
    return Op(
        name=record.text("name"),
        inputs=_values(record.integers("inputs")),
        outputs=_values(record.integers("outputs")),
        backward=record.flag("backward", False),
        recomputable=record.flag("recomputable", True),
        target=record.text("target", ""),
        module=record.text("module", ""),
        overwrites=_values(record.integers("overwrites")) if "overwrites" in record.fields else (),
    )


def _decode_instance(record: Record) -> Instance:
    nodes = record.records("nodes")
    costs = Costs(
        time_ns=tuple(node.number("time") for node in nodes),
        workspace_bytes=(0,) * len(nodes),
        size_bytes=tuple(node.integer("bytes") for node in nodes),
    )
    name = record.text("name", "")
    try:
        ops = tuple(_decode_node(node, number) for number, node in enumerate(nodes))
        graph = Graph(ops, len(nodes), _values(record.integers("outputs")), name)
        whole = _decode_copies(record, Problem(graph, costs, LARGEST_BYTES))
    except InvalidGraph as error:
        raise FileFormatError(f"{record.where}: {error}") from error
    return Instance(name, whole.graph, whole.costs, whole.host_budget_bytes)


def _decode_node(record: Record, number: int) -> Op:
    inputs = tuple(dict.fromkeys(record.integers("inputs")))
    if inputs and max(inputs) >= number:
        late = next(value for value in inputs if value >= number)
        raise FileFormatError(
            f"{record.where}: `inputs` lists node {late}, which does not stand before node {number}; "
            "list the nodes in a topological order."
        )
    name = record.text("name", str(number))
    return Op(name, _values(inputs), (ValueId(number),), backward=record.flag("backward", False))


def _values(numbers: tuple[int, ...]) -> tuple[ValueId, ...]:
    return cast("tuple[ValueId, ...]", numbers)
