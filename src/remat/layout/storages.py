"""What a step allocates, and which of it may be written over: buffers and pairs of them.

In: a problem and a schedule, or a step that was followed. Out: `Storages`. A result may be written into an input that
the op reads as its last reader and that nobody else can see: not an output, not the caller's, and not read again. A
view is no value of its own, so whoever reads one reads the value, and a saved value is one that is still to be read.
The graph knows bytes and no strides: whoever runs an op in place has to see that the two tensors lie alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from remat.core.eager import without_overwrites
from remat.core.graph import Op
from remat.core.problem import Problem
from remat.core.results.profile import BEFORE, MemoryClass, StepProfile
from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.layout.liveness import lifetimes, version_id
from remat.layout.problem import Buffer

_UNARY = (
    "abs,ceil,clamp,clamp_max,clamp_min,clone,cos,elu,erf,exp,expm1,floor,gelu,hardsigmoid,hardswish,hardtanh,leaky_relu,"
    "log,log1p,log_sigmoid_forward,mish,neg,reciprocal,relu,round,rsqrt,sigmoid,sign,silu,sin,softplus,sqrt,tanh,_to_copy"
)
_SEVERAL = "add,addcdiv,addcmul,div,lerp,masked_fill,maximum,minimum,mul,native_dropout,pow,rsub,sub,where"
_BACKWARD = (
    "elu_backward,gelu_backward,hardsigmoid_backward,hardswish_backward,hardtanh_backward,leaky_relu_backward,"
    "log_sigmoid_backward,mish_backward,mse_loss_backward,native_dropout_backward,sigmoid_backward,silu_backward,"
    "softplus_backward,tanh_backward,threshold_backward"
)
ELEMENTWISE = frozenset(f"{_UNARY},{_SEVERAL},{_BACKWARD}".split(","))
"""Ops of aten that read an element of each input and then write that element: an input may be their output."""


@dataclass(frozen=True, slots=True)
class Storages:
    buffers: tuple[Buffer, ...]
    in_place: tuple[tuple[int, int], ...]
    """(dying, born): the second buffer may be written into the first one's memory, in the step that reads one and
    makes the other. They have the same size."""


def is_elementwise(target: str) -> bool:
    """Whether an operator, as `aten.relu.default`, may write over what it reads."""
    parts = target.split(".")
    return parts[0] == "aten" and len(parts) > 1 and parts[1] in ELEMENTWISE


def storages_of(problem: Problem, schedule: Schedule, *, block_bytes: int = 1) -> Storages:
    """The storages of `schedule` if nothing were overwritten, and every pair that in-place ops could make one."""
    problem = without_overwrites(problem)
    buffers = lifetimes(problem, schedule, block_bytes=block_bytes)
    numbers = {buffer.id: number for number, buffer in enumerate(buffers)}
    found = ((numbers[dying], numbers[born]) for dying, born in _pairs(problem, schedule))
    return Storages(buffers, tuple(found))


def storages_of_step(profile: StepProfile) -> Storages:
    """The storages of a step that was followed or replayed; what was there before it is there from its first op."""
    buffers = [
        Buffer(f"s{number}", max(item.created, 0), min(item.freed + 1, max(len(profile.ops), 1)), item.size_bytes)
        for number, item in enumerate(profile.storages)
        if item.size_bytes > 0 and item.freed >= max(item.created, 0)
    ]
    numbers = {buffer.id: number for number, buffer in enumerate(buffers)}
    buffers += [
        Buffer(f"w{number}", number, number + 1, op.workspace_bytes)
        for number, op in enumerate(profile.ops)
        if op.workspace_bytes > 0
    ]
    found = ((numbers[f"s{dying}"], numbers[f"s{born}"]) for dying, born in _pairs_of_step(profile))
    return Storages(tuple(buffers), tuple(found))


def choose_in_place(storages: Storages) -> tuple[tuple[int, int], ...]:
    """Pairs that can all be made at once: a buffer is written over by one other, and written into one other."""
    over: set[int] = set()
    into: set[int] = set()
    chosen = []
    for dying, born in storages.in_place:
        if dying not in over and born not in into:
            over.add(dying)
            into.add(born)
            chosen.append((dying, born))
    return tuple(chosen)


def merged(storages: Storages, chosen: Collection[tuple[int, int]]) -> tuple[Buffer, ...]:
    """The buffers when the pairs of `chosen` are one: each chain lives from its first birth to its last death."""
    buffers = list(storages.buffers)
    gone = set()
    # A later link is merged first, so that its whole chain is taken over.
    for dying, born in sorted(chosen, key=lambda pair: -storages.buffers[pair[1]].lower):
        first, rest = buffers[dying], buffers[born]
        buffers[dying] = Buffer(first.id, first.lower, rest.upper, first.size, max(first.alignment, rest.alignment))
        gone.add(born)
    return tuple(buffer for number, buffer in enumerate(buffers) if number not in gone)


def _pairs(problem: Problem, schedule: Schedule) -> Iterator[tuple[str, str]]:
    ops, size = problem.graph.ops, problem.costs.size_bytes
    last_uses = simulate(problem, schedule).last_uses
    kept = frozenset(problem.graph.outputs)
    newest: dict[int, tuple[int, int]] = {}  # value -> the step that made its newest version, and its last use
    final = {number: step for step, number in enumerate(schedule.steps)}
    for step, number in enumerate(schedule.steps):
        op = ops[number]
        for value in op.inputs if is_elementwise(op.target) else ():
            made, last = newest[value]
            maker = schedule.steps[made]
            is_output = value in kept and final[maker] == made
            if last == step and not is_output and _is_ours(ops[maker]):
                yield from (
                    (version_id(made, value), version_id(step, born))
                    for born in op.outputs
                    if size[born] == size[value] > 0
                )
        for value, last in zip(op.outputs, last_uses[step], strict=True):
            newest[value] = (step, last)


def _is_ours(maker: Op) -> bool:
    """An op without an operator stands for the caller, whose tensors are not to be written over."""
    return bool(maker.target)


def _pairs_of_step(profile: StepProfile) -> Iterator[tuple[int, int]]:
    """As in a graph, except that what a step reads is not known: what dies with an op may be written over by it."""
    dying: dict[int, list[int]] = {}
    for number, item in enumerate(profile.storages):
        if item.kind is MemoryClass.ACTIVATION and item.created != BEFORE and "." in item.name:
            dying.setdefault(item.freed, []).append(number)
    for number, item in enumerate(profile.storages):
        if item.created != BEFORE and is_elementwise(profile.ops[item.created].target):
            yield from ((other, number) for other in _equal(profile, dying.get(item.created, ()), number))


def _equal(profile: StepProfile, dying: Sequence[int], born: int) -> Iterator[int]:
    item = profile.storages[born]
    for number in dying:
        other = profile.storages[number]
        if other.created < item.created and other.size_bytes == item.size_bytes > 0:
            yield number
