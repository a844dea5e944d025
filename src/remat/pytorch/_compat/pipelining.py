"""What torch.distributed.pipelining tells only by private names; tried on torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed, nn

from remat.errors import RematError

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
"""torch's names of what a rank computes, and those of a schedule that is printed."""


def is_schedule(item: Any) -> bool:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    return isinstance(item, (PipelineScheduleSingle, PipelineScheduleMulti))


def stages_of(schedule: Any) -> list[Any]:
    """The stages of this rank, in order."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def micro_batches(schedule: Any) -> int:
    return int(schedule._n_microbatches)


def loss_of(schedule: Any) -> Callable[..., Any] | None:
    loss: Callable[..., Any] | None = schedule._loss_fn
    return loss


def trains(schedule: Any) -> bool:
    """Whether a step that is called now goes back."""
    return bool(schedule._has_backward) and torch.is_grad_enabled()


def holds_sends(schedule: Any) -> bool:
    """Whether what was sent is let go of when the step ends, and not as soon as the next one is sent."""
    from torch.distributed.pipelining import Schedule1F1B

    return not isinstance(schedule, Schedule1F1B)


def orders_of(schedule: Any) -> dict[int, list[tuple[str, int, int]]]:
    """What each rank computes, in order: (kind, stage, micro-batch)."""
    # Where each rank has one stage, torch 2.13 numbers micro-batches in `pipeline_order` otherwise than it runs them.
    if hasattr(schedule, "_stages"):
        return {rank: [*_flat(actions)] for rank, actions in schedule.pipeline_order.items()}
    stage = schedule._stage
    return {rank: _recorded(schedule, rank, stage.num_stages) for rank in range(stage.num_stages)}


def schedule_of_kind(kind: str, stages: int, micros: int) -> Any:
    """A schedule of one stage a rank, by torch's name, that is only asked for its order: no rank need be there."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    try:
        found = get_schedule_class(kind)
    except ValueError:
        found = None
    if found is None or not issubclass(found, PipelineScheduleSingle):
        raise RematError(f"torch has no schedule {kind!r} of one stage a rank; write 1F1B or GPipe.")
    schedule = object.__new__(found)
    schedule.__dict__.update(_n_microbatches=micros, _num_stages=stages, _has_backward=True, scale_grads=True)
    schedule._stage, schedule._loss_fn = _Recorder(0, stages), None
    return schedule


def orders_of_kind(kind: str, stages: int, micros: int) -> dict[int, list[tuple[str, int, int]]]:
    """What each rank computes under a schedule of one stage a rank."""
    return orders_of(schedule_of_kind(kind, stages, micros))


def _flat(actions: Sequence[Any]) -> Iterator[tuple[str, int, int]]:
    for action in actions:
        if action is None:
            continue
        inner = getattr(action, "sub_actions", None)
        if inner:
            yield from _flat(inner)
        elif action.computation_type.name in KINDS:
            yield KINDS[action.computation_type.name], action.stage_index, action.microbatch_index


class _Recorder:
    """In the place of a stage, notes what a schedule has it compute; it sends and receives nothing."""

    has_backward = True
    is_first = is_last = False

    def __init__(self, index: int, count: int) -> None:
        self.stage_index, self.num_stages = index, count
        self.submod = nn.Identity()
        self.output_chunks: list[Any] = []
        self.noted: list[tuple[str, int, int]] = []

    def forward_one_chunk(self, number: int, *args: Any, **kwargs: Any) -> None:
        self.noted.append(("F", self.stage_index, number))

    def backward_one_chunk(self, number: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> None:
        self.noted.append(("B" if full_backward else "I", self.stage_index, number))

    def backward_weight_one_chunk(self, number: int, *args: Any, **kwargs: Any) -> None:
        self.noted.append(("W", self.stage_index, number))

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        """Whatever else a stage is asked for has nothing to send, to receive or to reduce."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: []


def _recorded(schedule: Any, rank: int, count: int) -> list[tuple[str, int, int]]:
    """The order in which a schedule of one stage a rank runs, told by its own code."""
    recorder, number = _Recorder(rank, count), schedule._n_microbatches
    told = copy.copy(schedule)
    told._stage, told._loss_fn, told._internal_losses = recorder, None, []
    told._initialize_stage = lambda *args, **kwargs: None
    told._step_microbatches([()] * number, [{}] * number)
    return recorder.noted


def first_of_batch(schedule: Any, args: Sequence[Any], kwargs: dict[str, Any], target: Any) -> tuple[Any, Any, Any]:
    """The first micro-batch: what its first stage is called with, and its target."""
    parts, named = schedule._split_inputs(tuple(args), kwargs)
    targets = torch.tensor_split(target, schedule._n_microbatches) if target is not None else [None]
    return parts[0], named[0], targets[0]


def initialize(schedule: Any, args: Any, kwargs: Any, target: Any, has_backward: bool = True) -> None:
    """Have torch find the shapes that stages send each other and make room for them, as its first step would."""
    for stage in stages_of(schedule):
        stage.has_backward = has_backward
    begin = schedule._initialize_stages if hasattr(schedule, "_stages") else schedule._initialize_stage
    code = getattr(begin, "__func__", begin).__code__
    takes_target = "target" in code.co_varnames[: code.co_argcount]
    begin(args, kwargs, target) if takes_target else begin(args, kwargs)


def received(stage: Any, number: int = 0) -> tuple[torch.Tensor, ...]:
    """Where a stage receives its inputs for a micro-batch; nothing for the first."""
    infos = stage.args_recv_info.get(number, ())
    return tuple(info.buffer for info in infos if getattr(info, "buffer", None) is not None)


def received_bytes(stage: Any) -> int:
    """All that a stage holds to receive inputs and gradients in."""
    infos = [info for found in (stage.args_recv_info, stage.grad_recv_info) for row in found.values() for info in row]
    buffers = [info.buffer for info in infos if isinstance(getattr(info, "buffer", None), torch.Tensor)]
    sizes = {item.untyped_storage().data_ptr(): int(item.untyped_storage().nbytes()) for item in buffers}
    return sum(sizes.values())


def go_back_at_once(stages: Sequence[Any]) -> None:
    """Have stages run all of backward where a schedule asks for gradients of inputs, and nothing where for the rest.

    So torch runs a stage that brings a function of its own for the rest.
    """
    for stage in stages:
        stage.dw_builder = lambda: _nothing


def _nothing() -> None:
    """What is left of a backward that has run whole."""


@contextlib.contextmanager
def before_waits(work: Callable[[], None]) -> Iterator[None]:
    """Meanwhile `work` is done before a schedule waits for what others send."""
    from torch.distributed.pipelining import schedules

    wait = schedules._wait_batch_p2p

    def do_and_wait(works: Any) -> Any:
        if works:
            work()
        return wait(works)

    schedules._wait_batch_p2p = do_and_wait
    try:
        yield
    finally:
        schedules._wait_batch_p2p = wait


def split(model: nn.Module, args: Any, kwargs: Any, begins: Sequence[str]) -> tuple[nn.Module, list[nn.Module]]:
    """The model as torch cuts it before the modules of these names, and its stages."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    cut = pipeline(model, args, kwargs, split_spec=dict.fromkeys(begins, SplitPoint.BEGINNING))
    return cut, [cut.get_stage_module(number) for number in range(cut.num_stages)]


def group_of_stage(stage: Any) -> Any:
    return stage.group if stage.group is not None else distributed.group.WORLD
