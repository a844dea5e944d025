"""Any valid schedule of a captured graph gives the same bits and the memory that was simulated."""

from __future__ import annotations

from functools import cache

import pytest

torch = pytest.importorskip("torch")

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.graphs import (
    Run,
    captured_from,
    random_schedule,
    real_inputs,
    run_schedule,
    unlimited,
)
from tests.support.steps import same_bits
from tests.unit.pytorch.random_module import WIDTH, RandomModule

from remat.core.schedule import Schedule, plain_schedule
from remat.core.simulate import simulate
from remat.core.validate import validate
from remat.pytorch.costs.allocations import peak_of, watch
from remat.pytorch.costs.op_costs import profile
from remat.pytorch.graph.capture import Captured
from remat.pytorch.run.lower import lower

ROWS = 512
MODULES = 12
GENERATOR_STATE_BYTES = 2 * 5056
"""A generator's state passes through a tensor while it is remembered or put back."""


@cache
def captured_module(seed: int) -> Captured:
    return captured_from(RandomModule(seed), torch.randn(ROWS, WIDTH))


@cache
def plain_run(seed: int) -> Run:
    captured = captured_module(seed)
    return run_schedule(captured, plain_schedule(captured.graph), real_inputs(captured))


def assert_same_run(expected: Run, found: Run) -> None:
    assert all(map(same_bits, expected.outputs, found.outputs))
    assert all(map(same_bits, expected.gradients, found.gradients))
    assert torch.equal(expected.generator, found.generator)


@settings(max_examples=20)
@given(module=st.integers(0, MODULES - 1), schedule=st.integers(0, 10**9))
def test_every_valid_schedule_gives_the_same_bits(module: int, schedule: int) -> None:
    captured = captured_module(module)
    steps = random_schedule(captured, schedule)
    validate(unlimited(captured), steps)
    assert_same_run(plain_run(module), run_schedule(captured, steps, real_inputs(captured)))


@pytest.mark.parametrize("module", range(MODULES))
def test_recomputing_everything_at_the_start_of_backward_gives_the_same_bits(module: int) -> None:
    captured = captured_module(module)
    ops = captured.graph.ops
    again = [number for number in range(captured.boundary) if ops[number].recomputable]
    steps = list(plain_schedule(captured.graph).steps)
    steps[captured.boundary + 1 : captured.boundary + 1] = again
    assert_same_run(plain_run(module), run_schedule(captured, Schedule(tuple(steps)), real_inputs(captured)))


@settings(max_examples=40)
@given(module=st.integers(0, MODULES - 1), schedule=st.integers(0, 10**9))
@example(module=0, schedule=0)
def test_every_valid_schedule_takes_the_memory_that_was_simulated(module: int, schedule: int) -> None:
    captured = captured_module(module)
    steps = random_schedule(captured, schedule)
    lowered = lower(captured, steps)
    inputs = real_inputs(captured)
    tangent = torch.ones(())
    mutations = len(captured.mutated)

    def run() -> None:
        outputs, saved = lowered.forward(list(inputs))
        # Like AOTAutograd, which copies updates of buffers into place and drops them.
        outputs = outputs[mutations:]
        arguments = [*saved, tangent.clone()]
        held = arguments[-1]
        del saved
        gradients = lowered.backward(arguments)
        del held, outputs, gradients

    with torch.no_grad():
        run()
        _, events = watch(run, torch.device("cpu"))
    predicted = simulate(unlimited(captured, profile(captured)), steps).peak_bytes
    replays = bool(set(steps.recomputed()) & captured.random_ops)
    assert predicted <= peak_of(events) <= predicted + replays * GENERATOR_STATE_BYTES
