"""A step is measured from its call to the end of backward, and what is resident in it is told by class."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from remat.pytorch._compat.memory import AllocationProfiler, profiler_is_running
from remat.pytorch.resident.memory import ResidentMemory
from remat.pytorch.run.watching import step_watch
from remat.pytorch.run.watching.step_watch import StepWatch

CPU = torch.device("cpu")


def watched(model: nn.Module, *args: Any, measure: bool = True) -> tuple[StepWatch, list[str]]:
    ended: list[str] = []
    watch = StepWatch(ResidentMemory(model, ()), lambda: ended.append("backward"))
    watch.begin_call(args, {}, prepare=lambda: measure)
    watch.begin_step(CPU, is_known=False, can_measure=measure)
    return watch, ended


def test_end_of_backward_is_told_once_and_only_after_a_backward_of_the_step() -> None:
    model, input = nn.Linear(4, 4), torch.randn(2, 4)
    watch, ended = watched(model, input)
    torch.ones((), requires_grad=True).backward()
    assert ended == []
    watch.before_forward(0, [input])
    output = model(input).sum()
    watch.end_gap()
    watch.before_backward([])
    output.backward()
    assert ended == ["backward"]
    assert not watch.is_measured


def test_parameters_and_inputs_are_resident_and_told_apart() -> None:
    model, input, unread = nn.Linear(4, 4), torch.randn(2, 4), torch.randn(7)
    watch, _ = watched(model, input, unread)
    watch.before_forward(0, [*model.parameters(), input])
    found = watch.resident_bytes(1, is_whole_step=True)
    watch.look_away()
    assert found["parameters"] == (16 + 4) * 4
    assert found["inputs"] == (8 + 7) * 4


def test_step_that_is_planned_is_not_measured() -> None:
    model, input = nn.Linear(4, 4), torch.randn(2, 4)
    watch, ended = watched(model, input, measure=False)
    watch.before_forward(0, [input])
    watch.before_backward([])
    model(input).sum().backward()
    assert ended == []
    assert not watch.is_measured


def run_back(watch: StepWatch, model: nn.Module, input: torch.Tensor) -> None:
    watch.before_forward(0, [input])
    output = model(input).sum()
    watch.end_gap()
    watch.before_backward([])
    output.backward()


def test_backward_before_the_first_graph_of_a_step_is_none_of_its_own() -> None:
    model, input = nn.Linear(4, 4), torch.randn(2, 4)
    watch, ended = watched(model, input)
    run_back(watch, model, input)
    watch.begin_call((input,), {}, prepare=lambda: True)
    torch.ones((), requires_grad=True).backward()
    assert ended == ["backward"]
    watch.begin_step(CPU, is_known=False, can_measure=True)
    run_back(watch, model, input)
    assert ended == ["backward", "backward"]


def test_call_in_which_no_graph_ran_leaves_no_profiler_behind() -> None:
    model, input = nn.Linear(4, 4), torch.randn(2, 4)
    watch, _ = watched(model, input)
    run_back(watch, model, input)
    watch.begin_call((input,), {}, prepare=lambda: True)
    assert profiler_is_running()
    watch.end_call()
    assert not profiler_is_running()


def test_step_whose_profiler_somebody_else_has_ended_is_not_planned_by_it() -> None:
    model, input = nn.Linear(4, 4), torch.randn(2, 4)
    watch, ended = watched(model, input)
    watch.before_forward(0, [input])
    watch.before_backward([])
    AllocationProfiler().stop()
    model(input).sum().backward()
    assert ended == []
    assert not watch.is_measured


def test_garbage_of_the_last_step_hides_nothing_of_what_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA what FSDP gathers before the first graph is what the allocator has handed out since the call."""
    allocated = [700]

    class Sharded:
        def device(self) -> torch.device:
            return torch.device("cuda")

        def is_sharded(self) -> bool:
            return True

        def given(self, *args: Any) -> dict[int, int]:
            return {}

    monkeypatch.setattr(step_watch.gc, "collect", lambda: allocated.__setitem__(0, 100))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated[0])
    watch = StepWatch(Sharded(), lambda: None)  # type: ignore[arg-type]
    monkeypatch.setattr(watch._meter, "start", lambda *args: None)
    watch.begin_call((), {}, prepare=lambda: True)
    assert watch._called_bytes == 100
