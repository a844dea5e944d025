from __future__ import annotations

from itertools import product

import pytest
from tests.contract import graphs
from tests.contract.brute_force import best_time

from remat.core.problem import Problem
from remat.core.schedule import plain_schedule
from remat.core.search.limits import Limits
from remat.core.simulate import simulate
from remat.solvers.exact.cuts import Cuts, solve_cuts
from remat.solvers.exact.priced_cut import EARLY_DISCOUNT, PricedCut
from remat.solvers.schedule.editable import FlatProblem, flatten

pytest.importorskip("scipy")


def at_peak(problem: Problem) -> tuple[FlatProblem, int, int]:
    """The parts of a problem, its tightest op, and the room for what is kept there."""
    flat, cut = flatten(problem), simulate(problem, plain_schedule(problem.graph)).peak_step
    return flat, cut, problem.budget_bytes - flat.resident - flat.workspace[cut] - flat.output_bytes[cut]


def naive(flat: FlatProblem, cut: int, price: float, room: int) -> float:
    """L of the module, by trying every set of ops that run again."""
    ops = [number for number in range(cut) if flat.recomputable[number]]
    later = {value for number in range(cut + 1, flat.count) for value in flat.inputs[number]} | flat.final
    found = []
    for chosen in product((False, True), repeat=len(ops)):
        again = {number for number, runs in zip(ops, chosen, strict=True) if runs}
        read = later | {value for number in again for value in flat.inputs[number]}
        held = {value for value in read if flat.producer[value] < cut and flat.producer[value] not in again}
        held |= {value for value in flat.inputs[cut] if flat.producer[value] < cut}
        time = sum(flat.time[number] * (1 - EARLY_DISCOUNT * (1 - number / cut)) for number in again)
        found.append(time + price * (sum(flat.size[value] for value in held) - room))
    return min(found)


@pytest.mark.parametrize("seed", range(30))
def test_equals_every_choice_tried(seed: int) -> None:
    problem = graphs.squeezed(graphs.tiny(seed), 0.8)
    flat, cut, room = at_peak(problem)
    if cut == 0:
        pytest.skip("nothing runs before the tightest op")
    unit = sum(flat.time) / max(flat.size)
    for price in (0.0, 0.1 * unit, 0.5 * unit, 1.5 * unit):
        found = PricedCut(flat, cut).at(price, room)
        assert found.bound_ns == pytest.approx(naive(flat, cut, found.price, room), rel=1e-6, abs=1e-3)


@pytest.mark.parametrize("seed", range(60))
def test_bound_holds_for_the_best_schedule(seed: int) -> None:
    problem = graphs.squeezed(graphs.tiny(seed), 0.85)
    flat, cut, room = at_peak(problem)
    optimum = best_time(problem)
    if optimum is not None:
        bound, _ = PricedCut(flat, cut).best(room)
        assert problem.base_time_ns + bound <= optimum * (1 + 1e-9)


@pytest.mark.parametrize("budget", [0.4, 0.6, 0.8])
def test_bound_is_that_of_the_relaxed_cut_program_less_the_discount(budget: float) -> None:
    pytest.importorskip("highspy")
    problem = graphs.squeezed(graphs.transformer(3), budget)
    flat, cut, room = at_peak(problem)
    relaxed = solve_cuts(flat, Cuts((cut,)), problem.budget_bytes, Limits(20.0), relaxed=True).extra_time
    bound, choice = PricedCut(flat, cut).best(room)
    assert relaxed * (1 - 2 * EARLY_DISCOUNT) <= bound
    assert bound <= relaxed * (1 + 1e-6)
    assert choice.kept_bytes <= room
