"""Checkpointing of chains and trees: each strategy against its own formula or an exhaustive search."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from tests.contract import graphs
from tests.contract.brute_force import best_time
from tests.support.training_graphs import random_chain, random_join, residual_blocks

from remat.core import Problem, floor_bytes, simulate
from remat.core.search.limits import Limits
from remat.solvers import get_solver
from remat.solvers.schedule.block_chain import BlockChain, block_chain_of, checkpoint_schedule, nested_schedule
from remat.solvers.schedule.blocks import find_chain, find_narrow_cuts
from remat.solvers.schedule.keep import turning_point
from remat.solvers.strategies import revolve, treeverse
from remat.solvers.strategies.chen_greedy import segment_cuts
from remat.solvers.strategies.every_n import EveryN


def budgets(problem: Problem) -> list[int]:
    low, high = floor_bytes(problem)[0], graphs.peak(problem)
    return sorted({low, (2 * low + high) // 3, (low + high) // 2, (low + 2 * high) // 3})


def inner_runs(line: BlockChain, problem: Problem, stored: list[frozenset[int]]) -> int:
    steps = checkpoint_schedule(line, stored).steps
    return sum(problem.graph.ops[op].name == "inner" for op in steps)


def binomial_runs(length: int, slots: int) -> int:
    """The formula of Griewank and Walther for the fewest block runs; `slots` counts the input of the first block."""
    times = next(r for r in range(length) if math.comb(slots + r, slots) >= length)
    return times * length - math.comb(slots + times, slots + 1)


@pytest.mark.parametrize("length", [1, 2, 3, 6, 10, 15, 21])
def test_revolve_runs_blocks_as_often_as_the_binomial_formula_says(length: int) -> None:
    problem = residual_blocks(length)
    line = block_chain_of(problem, [cut for cut in find_chain(problem, min_ops=1).cuts if cut])
    assert len(line.ends) == length
    table = revolve.runs(length, length)
    for slots in range(length):
        assert table[length][slots][0] == binomial_runs(length, slots + 1)
        assert inner_runs(line, problem, revolve.stored(table, length, slots)) == table[length][slots][0] + length


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("depth", [1, 2])
def test_treeverse_equals_revolve_on_binomial_lengths(slots: int, depth: int) -> None:
    length = math.comb(slots + depth, slots)
    problem = residual_blocks(length)
    line = block_chain_of(problem, [cut for cut in find_chain(problem, min_ops=1).cuts if cut])
    assert inner_runs(line, problem, treeverse.stored(length, slots)) == binomial_runs(length, slots) + length


def test_treeverse_is_never_better_than_revolve() -> None:
    for length in range(1, 20):
        problem = residual_blocks(length)
        line = block_chain_of(problem, [cut for cut in find_chain(problem, min_ops=1).cuts if cut])
        for slots in range(1, length + 1):
            assert inner_runs(line, problem, treeverse.stored(length, slots)) >= binomial_runs(length, slots) + length


def test_more_slots_never_take_more_runs() -> None:
    table = revolve.runs(30, 29)
    runs = [time for time, _ in table[30]]
    assert runs == sorted(runs, reverse=True)
    assert runs[0] == 30 * 29 // 2
    assert runs[-1] == 29


def persistent_plans(line: BlockChain, s: int, t: int, stored: frozenset[int]) -> Iterator[dict[int, frozenset[int]]]:
    """Every persistent plan for blocks s to t, as what is in memory when backward of each begins."""
    if s == t:
        yield {s: stored}
        return
    own = stored.union(value for value in line.computed(s) if line.saved[value])
    for later in persistent_plans(line, s + 1, t, own.union(line.crossing([s], s + 1, t))):
        yield {**later, s: own}
    for r in range(s + 1, t + 1):
        for later in persistent_plans(line, r, t, stored.union(line.crossing(range(s, r), r, t))):
            for more in {frozenset[int](), frozenset(line.left(r - 1))}:
                for earlier in persistent_plans(line, s, r - 1, stored | more):
                    yield {**later, **earlier}


@pytest.mark.parametrize(("length", "reads_result"), [(4, False), (3, True)])
@pytest.mark.parametrize("seed", range(8))
def test_chain_dp_is_never_slower_than_any_persistent_plan(seed: int, length: int, reads_result: bool) -> None:
    chain = random_chain(seed, length, reads_result=reads_result)
    line = block_chain_of(chain, {*find_chain(chain, min_ops=1).cuts, turning_point(chain) - 1})
    plans = [
        [plan[block] for block in range(len(line.ends))] for plan in persistent_plans(line, 0, line.last, frozenset())
    ]
    timelines = [simulate(chain, nested_schedule(line, plan)) for plan in plans]
    for budget in budgets(chain):
        times = [timeline.time_ns for timeline in timelines if timeline.peak_bytes <= budget]
        solution = get_solver("chain_dp").solve(chain.with_budget(budget), Limits(60.0))
        if times:
            assert solution.schedule is not None
            assert solution.time_ns <= min(times)


@pytest.mark.parametrize("seed", range(10))
def test_chain_dp_equals_brute_force_on_chains(seed: int) -> None:
    chain = random_chain(seed, 3, reads_result=True)
    for budget in budgets(chain):
        problem = chain.with_budget(budget)
        optimum = best_time(problem)
        solution = get_solver("chain_dp").solve(problem, Limits(60.0))
        assert solution.schedule is None if optimum is None else solution.time_ns == optimum


@pytest.mark.parametrize("seed", range(2, 10))
def test_tree_dp_equals_brute_force_on_joined_branches(seed: int) -> None:
    tree = random_join(seed, (2, 2))
    for budget in budgets(tree):
        problem = tree.with_budget(budget)
        optimum = best_time(problem)
        solution = get_solver("tree_dp").solve(problem, Limits(60.0))
        assert solution.schedule is None if optimum is None else solution.time_ns == optimum


def test_tree_dp_cuts_inside_branches_where_chain_dp_cannot() -> None:
    tree = random_join(3, (6, 6))
    problem = graphs.squeezed(tree, 0.7)
    inside = get_solver("tree_dp").solve(problem, Limits(60.0))
    outside = get_solver("chain_dp").solve(problem, Limits(60.0))
    assert inside.schedule is not None
    assert outside.schedule is None or inside.time_ns < outside.time_ns
    assert len(find_narrow_cuts(tree)) > len(find_chain(tree, min_ops=1).cuts)


def test_chain_dp_nests_recomputation_where_memory_is_short() -> None:
    problem = graphs.squeezed(graphs.chain(40), 0.31)
    solution = get_solver("chain_dp").solve(problem, Limits(60.0))
    assert solution.schedule is not None
    assert max(solution.schedule.recomputed().values()) > 1


def test_chen_greedy_closes_a_segment_once_it_passes_the_threshold() -> None:
    assert segment_cuts([5, 5, 5, 20, 1, 1], 10) == [1, 3]
    assert segment_cuts([5, 5], 100) == []


def test_every_n_with_a_given_n_has_one_schedule() -> None:
    problem = graphs.chain(20)
    assert len(list(EveryN(every=3).schedules(problem, 0))) == 1
    assert len(list(EveryN().schedules(problem, 0))) == len(find_chain(problem).cuts)
