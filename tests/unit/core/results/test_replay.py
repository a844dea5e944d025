"""A plan's schedule as a step: phases, lives and uses of its storages, and what is resident."""

from __future__ import annotations

from tests.unit.core.plans import small_plan

from remat.core.results.profile import BEFORE, MemoryClass, Phase
from remat.core.results.replay import replay, replay_plain

PLAN = small_plan()
assert PLAN.schedule is not None
PLAIN, PLANNED = replay_plain(PLAN, "small"), replay(PLAN, PLAN.schedule, "small")


def test_only_the_planned_step_recomputes() -> None:
    assert Phase.RECOMPUTE not in {op.phase for op in PLAIN.ops}
    again = [op for op in PLANNED.ops if op.phase is Phase.RECOMPUTE]
    assert len(again) == len(PLANNED.ops) - len(PLAIN.ops) > 0


def test_time_and_peak_are_the_plan_s() -> None:
    assert PLANNED.peak_bytes == PLAN.solution.peak_bytes <= PLAN.budget_bytes < PLAIN.peak_bytes
    assert PLANNED.seconds * 1e9 == PLAN.solution.time_ns
    assert PLANNED.is_estimate and PLANNED.name == "small" and PLANNED.device == "cpu"


def test_resident_bytes_keep_their_classes() -> None:
    resident = {item.kind: item.size_bytes for item in PLAIN.storages if item.created == BEFORE}
    assert resident == {MemoryClass.PARAMETER: 20, MemoryClass.INPUT: 12}
    assert all(item.freed == len(PLAIN.ops) for item in PLAIN.storages if item.created == BEFORE)


def test_recomputed_version_is_a_storage_of_its_own() -> None:
    versions: dict[int, list[tuple[int, int]]] = {}
    for item in PLANNED.storages:
        if item.value != BEFORE:
            versions.setdefault(item.value, []).append((item.created, item.freed))
    several = [spans for spans in versions.values() if len(spans) > 1]
    assert several
    assert all(first[1] < second[0] for spans in several for first, second in zip(spans, spans[1:], strict=False))


def test_activation_waits_between_forward_and_backward_in_the_plain_step() -> None:
    waiting = [item for item in PLAIN.storages if item.waits_for_backward]
    boundary = next(number for number, op in enumerate(PLAIN.ops) if op.phase is Phase.BACKWARD)
    assert waiting
    for item in waiting:
        assert item.kind is MemoryClass.ACTIVATION
        assert item.last_forward_use < boundary <= item.first_backward_use <= item.freed


def test_outputs_of_backward_are_gradients_that_outlive_the_step() -> None:
    gradients = [item for item in PLAIN.storages if item.kind is MemoryClass.GRADIENT]
    assert len(gradients) == 6
    assert all(item.freed == len(PLAIN.ops) for item in gradients)
