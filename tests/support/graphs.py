"""Captured graphs of small modules, and ways to run any schedule of them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from remat.core.budget import parse_budget
from remat.core.graph import OpId
from remat.core.problem import Costs, Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.pytorch.graph.capture import Captured
from remat.pytorch.resident.memory import ResidentMemory
from remat.pytorch.run.backend import EagerKernels, SessionBackend
from remat.pytorch.run.lower import Lowered, lower
from remat.pytorch.run.optimize import Runner
from remat.pytorch.run.session import Session
from remat.pytorch.run.settings import PlanReady, Settings
from remat.pytorch.run.variants import TracedGraph


def trace(model: nn.Module, *args: Any) -> TracedGraph:
    """The graph of `model(*args)`, traced as `remat.plan` does; nothing runs."""
    session = Session(Settings(parse_budget("50x"), solver="none", stop_after_plan=True), ResidentMemory(model))
    with contextlib.suppress(PlanReady):
        Runner(model._call_impl, partial(SessionBackend, EagerKernels(session)))(*args)
    (graph,) = session.graphs
    return graph


def captured_from(model: nn.Module, *args: Any) -> Captured:
    return trace(model, *args).variant().captured


def unlimited(captured: Captured, costs: Costs | None = None) -> Problem:
    """A problem in which every schedule fits."""
    count = len(captured.graph.ops)
    costs = costs or Costs((1.0,) * count, (0,) * count, captured.size_bytes)
    return Problem(captured.graph, costs, budget_bytes=2**60)


def random_schedule(captured: Captured, seed: int, most: int = 30) -> Schedule:
    """The plain order with recomputations put in at random places."""
    choice = random.Random(seed)
    graph = captured.graph
    steps = list(plain_schedule(graph).steps)
    for _ in range(choice.randint(1, most)):
        place = choice.randint(1, len(steps))
        candidates = [number for number in set(steps[:place]) if graph.ops[number].recomputable]
        if candidates:
            steps.insert(place, OpId(choice.choice(sorted(candidates))))
    return Schedule(tuple(steps))


@dataclass(frozen=True, slots=True)
class Run:
    outputs: tuple[Any, ...]
    gradients: tuple[Any, ...]
    generator: torch.Tensor


def run_schedule(captured: Captured, schedule: Schedule, inputs: Sequence[Any]) -> Run:
    return run_lowered(captured, lower(captured, schedule), inputs)


def run_lowered(captured: Captured, lowered: Lowered, inputs: Sequence[Any]) -> Run:
    """Forward and backward from a fixed seed, with gradients of one coming in."""
    torch.manual_seed(7)
    with torch.no_grad():
        outputs, saved = lowered.forward(list(inputs))
        tangents = [torch.ones(node.meta["val"].shape, dtype=node.meta["val"].dtype) for node in captured.tangents()]
        gradients = lowered.backward([*saved, *tangents])
    return Run(outputs, gradients, torch.get_rng_state())


def real_inputs(captured: Captured, seed: int = 0) -> list[Any]:
    """Positive numbers, so that they can stand for variances too."""
    generator = torch.Generator().manual_seed(seed)
    found: list[Any] = []
    for node in captured.inputs():
        fake = node.meta["val"]
        if isinstance(fake, torch.Tensor) and fake.is_floating_point():
            found.append(torch.rand(fake.shape, generator=generator, dtype=fake.dtype) + 0.1)
        elif isinstance(fake, torch.Tensor):
            found.append(torch.zeros(fake.shape, dtype=fake.dtype))
        else:
            found.append(fake)
    return found
