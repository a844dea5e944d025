"""The parts of the portfolio, each for what it promises."""

from __future__ import annotations

import pytest
from tests.contract import graphs
from tests.contract.brute_force import best_time

from remat.core import floor_bytes, simulate
from remat.core.search.limits import Limits
from remat.solvers import min_budget
from remat.solvers.exact.bounds import NEGLIGIBLE_SHARE, without_negligible
from remat.solvers.exact.cuts import Cuts, solve_cuts
from remat.solvers.schedule.blocks import find_chain, kept_at
from remat.solvers.schedule.editable import EditableSchedule, flatten
from remat.solvers.schedule.evict import EvictionRule, evict, unit_price
from remat.solvers.schedule.keep import drop_all_but, first_backward, keep_schedule
from remat.solvers.schedule.prune import prune, remove_unused
from remat.solvers.strategies.selective import expensive_ops

FAMILIES = [graphs.chain(10), graphs.transformer(4), graphs.layered(3)]
every_family = pytest.mark.parametrize("problem", FAMILIES, ids=lambda problem: problem.graph.name)


@every_family
def test_evict_reaches_the_budget(problem) -> None:  # type: ignore[no-untyped-def]
    editable = EditableSchedule(problem)
    budget = int(0.75 * editable.peak)
    assert evict(editable, budget, EvictionRule(price=unit_price(editable)), stop=lambda: False, max_steps=1000)
    assert simulate(problem, editable.schedule()).peak_bytes <= budget


@every_family
def test_evict_stops_when_nothing_can_be_dropped(problem) -> None:  # type: ignore[no-untyped-def]
    assert not evict(EditableSchedule(problem), 1, EvictionRule(price=1.0), stop=lambda: False, max_steps=1000)


@every_family
def test_prune_takes_back_everything_that_fits(problem) -> None:  # type: ignore[no-untyped-def]
    editable = EditableSchedule(problem)
    drop_all_but(editable, [frozenset()], [first_backward(problem)])
    prune(editable, problem.budget_bytes)
    assert editable.extra_steps() == []


@every_family
def test_prune_never_passes_the_budget(problem) -> None:  # type: ignore[no-untyped-def]
    editable = EditableSchedule(problem)
    drop_all_but(editable, [frozenset()], [first_backward(problem)])
    remove_unused(editable)
    budget, before = editable.peak, editable.extra_time
    prune(editable, budget)
    assert editable.peak <= budget
    assert editable.extra_time <= before


@every_family
def test_keeping_everything_is_the_plain_schedule(problem) -> None:  # type: ignore[no-untyped-def]
    schedule = keep_schedule(problem, range(problem.graph.value_count))
    assert not schedule.recomputed()


@every_family
def test_smallest_budget_lies_between_floor_and_plain_peak(problem) -> None:  # type: ignore[no-untyped-def]
    assert floor_bytes(problem)[0] <= min_budget(problem) <= graphs.peak(problem)


def test_long_chain_squeezes_far_below_its_plain_peak() -> None:
    problem = graphs.chain(60)
    assert min_budget(problem) < 0.4 * graphs.peak(problem)


def test_blocks_of_a_residual_network_are_cut_at_the_stream() -> None:
    problem = graphs.transformer(6)
    chain = find_chain(problem)
    ends = {problem.graph.ops[cut].name for cut in chain.cuts}
    assert ends <= {"add", "embed", "down"}
    assert len(kept_at(chain, 2)) < len(kept_at(chain, 1))


def test_selective_keeps_products_by_name() -> None:
    problem = graphs.transformer(2)
    assert {problem.graph.ops[number].name for number in expensive_ops(problem)} == {"up", "down"}


@pytest.mark.parametrize("seed", range(60))
def test_cut_bound_is_never_above_the_optimum(seed: int) -> None:
    pytest.importorskip("highspy")
    problem = graphs.squeezed(graphs.tiny(seed), 0.8 if seed % 2 else 0.65)
    optimum = best_time(problem)
    flat = flatten(problem)
    everywhere = frozenset((stage, number) for stage in range(flat.count) for number in range(stage))
    for ops in ((2,), (2, 4), (1, 3, 5), tuple(range(flat.count))):
        for relaxed, moments in ((True, frozenset()), (False, frozenset()), (False, everywhere)):
            cuts = Cuts(ops, moments)
            bound = solve_cuts(flat, cuts, problem.budget_bytes, Limits(2.0, gap=0.0), relaxed=relaxed).extra_time
            assert optimum is None or problem.base_time_ns + bound <= optimum + 1e-6


def test_leaves_out_only_crumbs() -> None:
    flat = flatten(graphs.transformer(3))
    total = sum(flat.size)
    assert without_negligible(flat, 0) == flat
    lighter = without_negligible(flat, int(total / 10 / NEGLIGIBLE_SHARE))
    assert 0 < total - sum(lighter.size) <= total / 10
    kept = [size for size in lighter.size if size]
    assert min(kept) > max(before for before, after in zip(flat.size, lighter.size, strict=True) if before != after)
