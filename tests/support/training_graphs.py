"""Chains and trees with random costs whose gradients run once, small enough for brute force."""

from __future__ import annotations

import random

from tests.contract.graphs import Builder

from remat.core import Problem


def random_chain(seed: int, length: int, *, reads_result: bool) -> Problem:
    """Each gradient reads its op's input, and its result too where `reads_result`."""
    rng, build = random.Random(seed), Builder()
    values = build.add("input", [], [rng.randint(1, 9)], rng.randint(1, 9))
    for _ in range(length):
        values += build.add("layer", [values[-1]], [rng.randint(1, 9)], rng.randint(1, 9))
    gradient = build.add("loss", [values[-1]], [1], 1, backward=True, recomputable=False)[0]
    weights = []
    for number in reversed(range(length)):
        reads = [values[number], gradient, *([values[number + 1]] if reads_result else [])]
        sizes = [rng.randint(1, 5), 1]
        gradient, weight = build.add("gradient", reads, sizes, rng.randint(1, 9), backward=True, recomputable=False)
        weights.append(weight)
    return build.problem([*weights, gradient], f"chain{seed}")


def random_join(seed: int, branches: tuple[int, ...]) -> Problem:
    """Branches of these lengths, one after another, that a last op joins; each gradient reads its op's inputs."""
    rng, build = random.Random(seed), Builder()
    forward: list[tuple[int, list[int]]] = []
    ends: list[int] = []
    for length in branches:
        inputs: list[int] = []
        for _ in range(length):
            value = build.add("layer", inputs, [rng.randint(1, 9)], rng.randint(1, 9))[0]
            forward.append((value, inputs))
            inputs = [value]
        ends += inputs
    last = build.add("join", ends, [rng.randint(1, 9)], rng.randint(1, 9))[0]
    forward.append((last, ends))
    gradients = {last: build.add("loss", [last], [1], 1, backward=True, recomputable=False)[0]}
    for value, inputs in reversed(forward):
        sizes = [rng.randint(1, 5) for _ in inputs] or [1]
        reads = [*inputs, gradients[value]]
        made = build.add("gradient", reads, sizes, rng.randint(1, 9), backward=True, recomputable=False)
        gradients.update(zip(inputs, made, strict=False))
    return build.problem(made[:1], f"join{seed}")


def residual_blocks(count: int) -> Problem:
    """Equal blocks of an inner op and a sum with the block's input; each gradient reads the inner value."""
    build = Builder()
    stream = build.add("input", [], [4], 1)[0]
    inner = []
    for _ in range(count):
        inner += build.add("inner", [stream], [4], 10)
        stream = build.add("sum", [stream, inner[-1]], [4], 1)[0]
    gradient = build.add("loss", [stream], [4], 1, backward=True)[0]
    for value in reversed(inner):
        gradient = build.add("gradient", [gradient, value], [4], 10, backward=True)[0]
    return build.problem([gradient], "residual")
