"""Generated graphs: valid by construction, the same for the same seed, and of the shapes they promise."""

from __future__ import annotations

import pytest

from remat.core import Problem, floor_bytes, plain_schedule, simulate
from remat.zoo.recorder import Recorder
from remat.zoo.synthetic import GENERATORS, Sizes, chain, densenet_like, random_layered, transformer, tree, unet_like

SMALL = {
    "transformer": 2,
    "random_layered": 30,
    "chain": 5,
    "unet_like": 2,
    "densenet_like": 4,
    "tree": 3,
    "recurrence": 3,
}


def peak(problem: Problem) -> int:
    return simulate(problem, plain_schedule(problem.graph)).peak_bytes


@pytest.mark.parametrize("name", GENERATORS)
def test_same_size_gives_the_same_problem(name: str) -> None:
    assert GENERATORS[name](SMALL[name]) == GENERATORS[name](SMALL[name])


@pytest.mark.parametrize("name", GENERATORS)
def test_recomputation_has_something_to_save(name: str) -> None:
    problem = GENERATORS[name](SMALL[name])
    assert floor_bytes(problem)[0] < peak(problem)


@pytest.mark.parametrize("name", GENERATORS)
def test_every_value_is_read_or_an_output(name: str) -> None:
    graph = GENERATORS[name](SMALL[name]).graph
    idle = {value for value, readers in enumerate(graph.consumers()) if not readers} - set(graph.outputs)
    assert idle == set()


@pytest.mark.parametrize("make", [random_layered, chain, tree])
def test_seed_changes_the_problem(make) -> None:
    assert make(5, 1) != make(5, 2)


def test_large_transformer_has_ten_thousand_ops() -> None:
    assert len(transformer(114).graph.ops) >= 10_000


def test_attention_scores_outweigh_the_stream_of_a_long_text() -> None:
    sizes = Sizes(length=2048)
    assert sizes.scores_bytes > sizes.stream_bytes
    assert sizes.scores_bytes in transformer(1, sizes).costs.size_bytes


def test_transformer_without_dropout_has_fewer_ops() -> None:
    assert len(transformer(2, Sizes(dropout=False)).graph.ops) < len(transformer(2).graph.ops)


def test_random_layered_has_the_asked_number_of_nodes_and_one_output() -> None:
    for count in (1, 2, 3, 40):
        graph = random_layered(count).graph
        assert (len(graph.ops), graph.outputs) == (count, (count - 1,))
        assert not any(op.backward for op in graph.ops)


def test_skips_of_a_densenet_grow_with_the_square_of_its_depth() -> None:
    short, long = (sum(len(op.inputs) for op in densenet_like(layers).graph.ops) for layers in (10, 40))
    assert long > 8 * short


def test_unet_keeps_its_first_level_for_its_last() -> None:
    graph = unet_like(3).graph
    forward = [number for number, op in enumerate(graph.ops) if not op.backward]
    reach = max(number - graph.producers()[value] for number in forward for value in graph.ops[number].inputs)
    assert reach > len(forward) // 2


def test_gradients_of_a_value_with_two_readers_are_added() -> None:
    step = Recorder()
    x = step.embed("x", 8, 4)
    loss = step.product("square", step.pointwise("a", x), step.pointwise("b", x), 8, 0)
    names = [op.name for op in step.finish("sum", loss).graph.ops]
    assert names[-2:] == ["add_gradients", "x_weight"]
    assert names.count("add_gradients") == 1
