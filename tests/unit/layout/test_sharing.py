"""Sharing by tags: the classic result and the exact one, on the examples of the docs and on random graphs."""

from __future__ import annotations

import random
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from remat.core import Costs, Graph, Op, Problem, ValueId, plain_schedule
from remat.errors import InvalidLayout
from remat.layout import LayoutProblem, load, place
from remat.layout.examples import exp_of_sum, two_layer_mlp
from remat.layout.sharing import Sharing, check_sharing, load_in_place, share_by_tags
from remat.layout.sharing_exact import share_exactly
from remat.layout.storages import Storages, choose_in_place, merged, storages_of

DOCS = Path(__file__).parents[3] / "docs"


def totals(problem: Problem) -> list[int]:
    """Bytes of: all apart, free tags, exact; and the last two with in-place."""
    schedule = plain_schedule(problem.graph)
    storages = storages_of(problem, schedule)
    found = [
        share_by_tags(problem, schedule, in_place=False),
        share_exactly(Storages(storages.buffers, ())),
        share_by_tags(problem, schedule),
        share_exactly(storages),
    ]
    for sharing in found:
        check_sharing(sharing)
    assert found[1].bound_bytes == found[1].total_bytes
    assert found[3].bound_bytes == found[3].total_bytes
    return [sum(buffer.size for buffer in storages.buffers), *(sharing.total_bytes for sharing in found)]


def test_exp_of_sum_needs_one_buffer_in_place_and_two_without() -> None:
    assert totals(exp_of_sum(64)) == [192, 128, 128, 64, 64]


def test_two_layer_mlp_shares_as_the_docs_say() -> None:
    assert totals(two_layer_mlp()) == [168_260, 131_140, 102_468, 77_892, 77_892]


def test_addresses_of_the_two_layer_mlp_are_no_higher_than_its_tags() -> None:
    problem = two_layer_mlp()
    storages = storages_of(problem, plain_schedule(problem.graph))
    assert place(LayoutProblem(storages.buffers)).height == 102_468
    assert place(LayoutProblem(merged(storages, choose_in_place(storages)))).height == 77_892


@pytest.mark.parametrize("name", ["sharing-exp.svg", "sharing-mlp.svg"])
def test_pictures_of_the_docs_are_those_of_the_sources(name: str) -> None:
    script = runpy.run_path(str(DOCS / "draw_sharing.py"))
    assert (DOCS / "images" / name).read_text(encoding="utf-8") == script["draw"](*script["PICTURES"][name])


def random_problem(seed: int, ops: int) -> Problem:
    draw = random.Random(seed)
    rows = []
    for number in range(ops):
        read = tuple(ValueId(value) for value in sorted(draw.sample(range(number), min(number, draw.randint(0, 2)))))
        target = draw.choice(("aten.add.Tensor", "aten.mm.default"))
        rows.append(Op(f"op{number}", read, (ValueId(number),), target=target))
    outputs = tuple(ValueId(value) for value in sorted({ops - 1, draw.randrange(ops)}))
    sizes = tuple(draw.choice((1, 2, 3, 5)) for _ in range(ops))
    workspace = tuple(draw.choice((0, 0, 0, 2)) for _ in range(ops))
    return Problem(Graph(tuple(rows), ops, outputs), Costs((1.0,) * ops, workspace, sizes), 10**6)


def partitions(count: int) -> Iterator[tuple[int, ...]]:
    """Every way to give `count` buffers tags, each once."""

    def go_on(tags: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(tags) == count:
            yield tags
            return
        for tag in range(max(tags, default=-1) + 2):
            yield from go_on((*tags, tag))

    return go_on(())


def is_valid(sharing: Sharing) -> bool:
    try:
        check_sharing(sharing)
    except InvalidLayout:
        return False
    return True


@pytest.mark.parametrize("seed", range(12))
def test_exact_is_the_least_of_all_partitions(seed: int) -> None:
    problem = random_problem(seed, 6)
    storages = storages_of(problem, plain_schedule(problem.graph))
    every = (Sharing(storages, tags, 0) for tags in partitions(len(storages.buffers)))
    assert share_exactly(storages).total_bytes == min(found.total_bytes for found in every if is_valid(found))


@pytest.mark.parametrize("seed", range(30))
def test_classic_is_valid_and_never_below_the_exact_total(seed: int) -> None:
    problem = random_problem(seed, 12)
    schedule = plain_schedule(problem.graph)
    storages = storages_of(problem, schedule)
    classic, exact = share_by_tags(problem, schedule), share_exactly(storages)
    check_sharing(classic)
    check_sharing(exact)
    assert load_in_place(storages) <= exact.bound_bytes <= exact.total_bytes <= classic.total_bytes
    assert load_in_place(storages) <= load(LayoutProblem(storages.buffers))


def test_a_search_that_gives_up_keeps_to_what_is_proven() -> None:
    problem = random_problem(3, 12)
    storages = storages_of(problem, plain_schedule(problem.graph))
    given_up = share_exactly(storages, node_limit=1)
    check_sharing(given_up)
    assert given_up.bound_bytes <= share_exactly(storages).total_bytes <= given_up.total_bytes


def test_buffers_alive_together_cannot_share() -> None:
    storages = storages_of(two_layer_mlp(), plain_schedule(two_layer_mlp().graph))
    with pytest.raises(InvalidLayout, match="share a tag"):
        check_sharing(Sharing(storages, (0,) * len(storages.buffers), 0))
