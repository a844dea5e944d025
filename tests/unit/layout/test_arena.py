"""The arena of a schedule: laid out, held to its schedule, counted by a budget and kept in the plan's file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from remat.core import Fingerprint, Plan, Problem, Schedule, plain_schedule, simulate
from remat.core.arena import Arena
from remat.core.budget import BudgetScope, parse_budget_scope
from remat.core.memory_rules import CPU
from remat.errors import BudgetError, FileFormatError, InfeasibleBudget, InvalidLayout
from remat.layout.arena import check_arena, lay_out
from remat.layout.examples import two_layer_mlp
from remat.within import fit_within
from remat.zoo.synthetic import unet_like

BLOCK = 64


def scheduled() -> tuple[Problem, Schedule]:
    problem = two_layer_mlp()
    return problem, plain_schedule(problem.graph)


def test_the_arena_of_the_two_layer_mlp_is_its_load_in_whole_blocks() -> None:
    problem, schedule = scheduled()
    arena = lay_out(problem, schedule, block_bytes=BLOCK)
    check_arena(problem, schedule, arena)
    peak = simulate(problem, schedule).peak_bytes
    assert peak <= arena.height_bytes <= peak + 5 * BLOCK
    assert all(offset % BLOCK == 0 for offset in arena.offsets)


def test_an_arena_that_overlaps_or_misstates_its_height_is_refused() -> None:
    problem, schedule = scheduled()
    arena = lay_out(problem, schedule, block_bytes=BLOCK)
    for wrong, message in (
        (replace(arena, offsets=(0,) * len(arena.offsets)), "overlap"),
        (replace(arena, height_bytes=arena.height_bytes - 1), "says"),
        (replace(arena, offsets=arena.offsets[:-1]), "offsets"),
        (replace(arena, block_bytes=0), "blocks"),
    ):
        with pytest.raises(InvalidLayout, match=message):
            check_arena(problem, schedule, wrong)


def fitted(share: float, counts: BudgetScope) -> tuple[Problem, Plan]:
    problem = unet_like(2)
    peak = simulate(problem, plain_schedule(problem.graph)).peak_bytes
    problem = problem.with_budget(int(share * peak))
    found = fit_within(problem, "auto", rules=CPU, time_limit_s=1.0, counts=counts)
    return problem, Plan(
        problem, found.solution, Fingerprint((), "", "cpu", ()), peak, counts=counts, arena=found.arena
    )


@pytest.mark.parametrize("share", [1.0, 0.7, 0.55])
def test_a_counted_arena_stays_within_the_budget(share: float, tmp_path: Path) -> None:
    problem, plan = fitted(share, BudgetScope.ARENA)
    assert plan.arena is not None and plan.schedule is not None and plan.arena_bytes is not None
    check_arena(problem, plan.schedule, plan.arena)
    assert plan.predicted_peak <= plan.arena_bytes <= plan.budget_bytes
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_an_arena_over_the_budget_is_solved_again_with_less(monkeypatch: pytest.MonkeyPatch) -> None:
    heights: list[int] = []

    def clumsy(problem: Problem, schedule: Schedule, *, capacity_bytes: int | None, **limits: object) -> Arena:
        """As high as if a tenth were lost between the buffers."""
        height = simulate(problem, schedule).peak_bytes * 11 // 10
        heights.append(height)
        return Arena(1, height, ())

    monkeypatch.setattr("remat.layout.arena.lay_out", clumsy)
    problem, plan = fitted(0.7, BudgetScope.ARENA)
    assert len(heights) > 1
    assert heights[0] > problem.budget_bytes >= heights[-1]
    assert plan.solution.bound_ns <= plan.solution.time_ns


def test_a_budget_that_no_arena_fits_names_one_that_is_known() -> None:
    problem = unet_like(2)
    with pytest.raises(InfeasibleBudget) as caught:
        fit_within(problem.with_budget(1000), "auto", rules=CPU, time_limit_s=1.0, counts=BudgetScope.ARENA)
    assert caught.value.min_budget > 1000


def test_live_bytes_alone_need_no_arena() -> None:
    assert fitted(0.7, BudgetScope.LIVE)[1].arena is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arena": None}, "counts the arena and has none"),
        ({"counts": "pages"}, "must be one of live, arena"),
        ({"arena": {"block_bytes": 64, "height_bytes": 1, "offsets": []}}, "arena that is not valid"),
        ({"arena": {"block_bytes": 0, "height_bytes": 1, "offsets": []}}, "arena that is not valid"),
        ({"arena": {"block_bytes": 64, "height_bytes": 1, "offsets": [-1]}}, "integers from 0"),
        ({"arena": 3}, "must be object"),
    ],
)
def test_a_damaged_arena_is_refused_in_one_sentence(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "plan.json"
    fitted(0.7, BudgetScope.ARENA)[1].save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FileFormatError, match=message):
        Plan.load(path)


def test_an_arena_over_its_own_budget_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    fitted(1.0, BudgetScope.ARENA)[1].save(path)
    content = json.loads(path.read_text())
    offsets, height = content["arena"]["offsets"], content["arena"]["height_bytes"]
    content["arena"] |= {"offsets": [offset + 64 * height for offset in offsets], "height_bytes": 65 * height}
    path.write_text(json.dumps(content))
    with pytest.raises(FileFormatError, match="over its budget"):
        Plan.load(path)


def test_a_file_from_before_arenas_counts_live_bytes(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    fitted(0.7, BudgetScope.LIVE)[1].save(path)
    content = json.loads(path.read_text())
    del content["arena"], content["counts"]
    path.write_text(json.dumps(content))
    plan = Plan.load(path)
    assert (plan.counts, plan.arena, plan.arena_bytes) == (BudgetScope.LIVE, None, None)


def test_a_budget_counts_what_it_is_told() -> None:
    assert parse_budget_scope("arena") is BudgetScope.ARENA
    with pytest.raises(BudgetError, match="'live' or 'arena'"):
        parse_budget_scope("pages")
