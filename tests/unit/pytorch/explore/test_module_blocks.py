"""Repeated blocks are found in the module tree; checkpointed, they train alike and need what the graph says."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

import remat
from remat import zoo
from remat.pytorch.costs.op_costs import profile
from remat.pytorch.explore.max_batch import GENERATOR_BYTES
from remat.pytorch.explore.module_blocks import checkpointed, repeated_blocks
from remat.pytorch.explore.scaling import capture_step
from remat.solvers.schedule.module_blocks import block_schedule, blocks_peak_bytes


@pytest.mark.parametrize(
    ("name", "count", "first"),
    [
        ("gpt", 6, "layers.0"),
        ("resnet50", 16, "stages.0.0"),
        ("unet", 6, "down.0"),
        ("mlp", 8, "layers.0"),
        ("lstm", 0, ""),
    ],
)
def test_blocks_of_the_zoo(name: str, count: int, first: str) -> None:
    found = repeated_blocks(zoo.build(name).model)
    assert len(found) == count
    assert next(iter(found), "") == first


def test_function_has_no_blocks() -> None:
    assert repeated_blocks(lambda x: x) == ()


def test_checkpointed_model_gives_the_same_gradients_and_is_restored() -> None:
    example = zoo.build("mlp", depth=3)

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        example.model.zero_grad()
        example.model(*example.args).backward()
        return [parameter.grad.clone() for parameter in example.model.parameters()]

    plain = gradients()
    with checkpointed(example.model):
        assert all(map(torch.equal, plain, gradients()))
    assert all("forward" not in layer.__dict__ for layer in example.model.layers)


@pytest.mark.parametrize("name", ["mlp", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_schedule_of_the_graph_needs_what_checkpointing_really_needs(name: str) -> None:
    example = zoo.build(name)
    step = capture_step(example)
    problem, blocks = step.problem(profile(step.captured)), repeated_blocks(example.model)
    predicted = blocks_peak_bytes(problem, block_schedule(problem, blocks), blocks, GENERATOR_BYTES)
    with checkpointed(example.model) as model:
        measured = remat.measure(model, *example.args).peak_bytes
    assert predicted == pytest.approx(measured, rel=0.002)


def test_captured_step_lets_go_of_its_model() -> None:
    example = zoo.build("mlp", depth=1)
    model = weakref.ref(example.model)
    step = capture_step(example)
    del example
    gc.collect()
    assert model() is None
    assert step.resident_bytes > 0
