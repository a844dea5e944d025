"""Pipelines: orders of torch's schedules, memory and time of ranks, plans of stages, cuts of models."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.support.nets import Stack
from torch import distributed

from remat.core.validate import validate
from remat.distributed.pipelines.actions import Action, StageWork, at_once, in_flight, is_split, orders_of
from remat.distributed.pipelines.balance import ChainBlock, cut, stage_time_ns
from remat.distributed.pipelines.early import computed_early, early_backward, early_steps
from remat.distributed.pipelines.rank_memory import RankHolds, StageHolds, StageNeeds, peak_bytes
from remat.distributed.pipelines.stage_problem import StageLimits, StageProblem
from remat.distributed.pipelines.stage_session import captured_stage, stage_module
from remat.distributed.pipelines.timing import follow_pipeline
from remat.errors import InfeasibleBudget, RematError
from remat.pytorch._compat.pipelining import orders_of_kind
from remat.pytorch.resident.memory import ResidentMemory
from remat.pytorch.run.lower import lower

if not distributed.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

NEEDS = StageNeeds(10, 14, 17, forward_ns=1.0, backward_ns=3.0, early_ns=1.0)


@pytest.mark.parametrize("stages, micros", [(2, 4), (4, 4), (4, 8), (4, 2)])
def test_micro_batches_in_flight_are_told_by_the_schedule(stages: int, micros: int) -> None:
    every = orders_of(orders_of_kind("1F1B", stages, micros))
    assert [in_flight(every[rank])[rank] for rank in range(stages)] == [
        min(micros, stages - rank) for rank in range(stages)
    ]
    every = orders_of(orders_of_kind("GPipe", stages, micros))
    assert [in_flight(every[rank])[rank] for rank in range(stages)] == [micros] * stages


def test_unknown_schedule_is_refused() -> None:
    with pytest.raises(RematError, match="torch has no schedule 'ring' of one stage a rank"):
        orders_of_kind("ring", 2, 4)
    with pytest.raises(RematError, match="run 1 forwards and 0 backwards"):
        orders_of({0: [("F", 0, 0)]})


def test_backward_in_two_parts_is_planned_where_its_first_part_was() -> None:
    noted = [("F", 0, 0), ("F", 0, 1), ("I", 0, 0), ("F", 0, 2), ("I", 0, 1), ("W", 0, 0), ("B", 0, 2), ("W", 0, 1)]
    orders = orders_of({0: noted})
    whole = at_once(orders)
    assert is_split(orders)
    assert not is_split(whole)
    assert " ".join(map(str, whole[0])) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert (in_flight(orders[0]), in_flight(whole[0])) == ({0: 3}, {0: 2})


def test_rank_holds_what_waiting_micro_batches_saved() -> None:
    """Two forwards, then two backwards, by hand."""
    order = tuple(Action(work, 0, micro) for work in (StageWork.FORWARD, StageWork.BACKWARD) for micro in (0, 1))
    stage = StageHolds(gradient_bytes=5, sent_back_bytes=0, output_bytes=2, is_last=False)
    holds = RankHolds({0: stage}, 100, holds_sends=False)
    # 100 + 14 | 110 + 14 | 110 + 17 | 100 + 5 + 2 + 17
    assert peak_bytes(order, {0: NEEDS}, holds) == 127
    larger = RankHolds({0: StageHolds(20, 0, 2, is_last=False)}, 100, holds_sends=False)
    assert peak_bytes(order, {0: NEEDS}, larger) == 100 + 20 + 2 + 17


@pytest.mark.parametrize("stages, micros", [(2, 4), (4, 4)])
def test_waits_hide_what_is_computed_again(stages: int, micros: int) -> None:
    """Without: (micros + stages - 1) rounds of forward and backward. With: all but the last stage compute ahead."""
    orders = orders_of(orders_of_kind("GPipe", stages, micros))
    needs = dict.fromkeys(range(stages), NEEDS)
    plain, filled = (follow_pipeline(orders, needs, fills=fills) for fills in (False, True))
    assert plain.total_ns == (micros + stages - 1) * 4.0
    assert filled.total_ns == plain.total_ns - (stages - 1) * NEEDS.early_ns
    assert sum(map(filled.waits_ns, orders)) < sum(map(plain.waits_ns, orders))


@pytest.fixture(scope="module")
def stage() -> StageProblem:
    torch.manual_seed(0)
    module = Stack(6)
    _, session, runner = stage_module(module, ResidentMemory(module))
    variant = captured_stage(session, runner, (torch.randn(8, *_input_shape(module)).requires_grad_(),), {}, "It")
    return StageProblem(variant.captured, variant.costs(), is_last=False)


def _input_shape(module: Any) -> tuple[int, ...]:
    first = next(item for item in module.modules() if isinstance(item, torch.nn.Linear))
    return (first.in_features,)


def test_plan_of_a_stage_keeps_to_each_of_its_limits(stage: StageProblem) -> None:
    plain = stage.needs(stage.plain())
    least = stage.least_saved_bytes("auto", 1.0)
    assert least < plain.saved_bytes
    most = max(plain.forward_peak_bytes, plain.backward_peak_bytes)
    for share in (0.2, 0.6):
        saved = least + int(share * (plain.saved_bytes - least))
        limits = StageLimits(most + 100, most, saved)
        solution = stage.solve(limits, "auto", 1.0, 0)
        assert solution.schedule is not None
        validate(stage.problem(1 << 40), solution.schedule)
        needs = stage.needs(solution.schedule)
        assert needs.saved_bytes <= saved
        assert needs.forward_peak_bytes <= limits.forward_bytes
        assert needs.backward_peak_bytes <= limits.backward_bytes
    with pytest.raises(InfeasibleBudget):
        stage.solve(StageLimits(most, most, least // 2), "auto", 1.0, 0)


def test_backward_that_begins_early_gives_the_same_bits(stage: StageProblem) -> None:
    least = stage.least_saved_bytes("auto", 1.0)
    plain = stage.needs(stage.plain())
    limits = StageLimits(2 * plain.backward_peak_bytes, 2 * plain.backward_peak_bytes, least)
    solution = stage.solve(limits, "auto", 1.0, 0)
    assert solution.schedule is not None
    captured = stage.captured
    room = 2 * plain.backward_peak_bytes + stage.received_bytes
    early = computed_early(stage.problem(), solution.schedule, captured, room)
    validate(stage.problem(1 << 40), early)
    assert Counter(early.steps) == Counter(solution.schedule.steps)
    assert early_steps(captured, early) > 0
    assert max(stage.needs(early).backward_peak_bytes, 0) <= 2 * plain.backward_peak_bytes
    lowered = lower(captured, early)
    parts = early_backward(captured, lowered)
    assert parts is not None
    torch.manual_seed(1)
    inputs = [torch.randn(node.meta["val"].shape) for node in captured.inputs()]
    tangents = [torch.randn(node.meta["val"].shape) for node in captured.tangents()]
    found = []
    for is_early in (False, True):
        torch.manual_seed(2)
        saved = list(lowered.forward(list(inputs))[1])
        # Backward may write into what it was given.
        given = [item.clone() for item in tangents]
        found.append(
            parts.rest.backward([*parts.begin(saved), *given]) if is_early else lowered.backward([*saved, *given])
        )
    whole, rest = found
    assert all(torch.equal(one, other) for one, other in zip(whole, rest, strict=True) if one is not None)


def _block(time: float, saved: int, least: int = 1, resident: int = 0) -> ChainBlock:
    return ChainBlock(StageNeeds(saved, saved, saved, time, 2 * time), least, resident)


def test_cut_is_the_best_of_all() -> None:
    blocks = [_block(time, saved) for time, saved in ((3, 8), (1, 4), (2, 4), (2, 9), (1, 2), (4, 5))]
    for allowed in (math.inf, 60, 40):
        waiting = [3, 2, 1]
        every = itertools.combinations(range(1, len(blocks)), 2)
        found = [
            max(
                stage_time_ns(blocks[start:end], waiting[number], allowed)
                for number, (start, end) in enumerate(itertools.pairwise((0, *ends, len(blocks))))
            )
            for ends in every
        ]
        assert max(cut(blocks, waiting, allowed).time_ns) == min(found)
    with pytest.raises(InfeasibleBudget, match="No cut of 6 blocks into 3 stages fits"):
        cut(blocks, [3, 2, 1], 3)


def test_stage_with_more_in_flight_gets_fewer_blocks() -> None:
    blocks = [_block(1, 10, least=1) for _ in range(8)]
    assert cut(blocks, [1, 1], math.inf).ends == (4, 8)
    assert cut(blocks, [8, 1], 60).ends[0] < 4
