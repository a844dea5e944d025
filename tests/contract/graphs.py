"""Small training graphs with forward and mirrored backward, for tests of solvers.

Each function returns a `Problem` with no limit; tests lower the budget.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from remat.core import Problem, plain_schedule, simulate
from remat.zoo.recorder import Builder


def chain(length: int, resident: int = 0) -> Problem:
    """x → f1 → … → fn → loss, then backward; each gradient reads its op's input and output."""
    build = Builder()
    values = [build.add("input", [], [8], 1)[0]]
    for number in range(length):
        values += build.add(
            f"layer{number}", [values[-1]], [10 + number % 3], 5 + number % 4, module=f"layers.{number}"
        )
    gradient = build.add("loss", [values[-1]], [1], 1, backward=True)[0]
    outputs = []
    for number in reversed(range(length)):
        read = [values[number], values[number + 1], gradient]
        sizes = [10, 2]
        made = build.add(f"layer{number}_backward", read, sizes, 10, backward=True, module=f"layers.{number}")
        gradient = made[0]
        outputs.append(made[1])
    return build.problem(outputs, "chain", resident)


def transformer(layers: int) -> Problem:
    """Residual blocks of a norm, a cheap wide activation and an expensive product, a shared mask and dropout pins."""
    build = Builder()
    mask = build.add("mask", [], [1], 1)[0]
    stream = build.add("embed", [], [16], 4, recomputable=False)[0]
    saved: list[list[int]] = []
    for number in range(layers):
        where = f"layers.{number}"
        norm, mean = build.add("norm", [stream], [16, 1], 2, module=where)
        wide = build.add("up", [norm], [64], 60, workspace=4, module=where, target="aten.mm.default")[0]
        active = build.add("gelu", [wide], [64], 4, module=where)[0]
        dropped = build.add("drop", [active, mask], [64, 16], 4, module=where, recomputable=number % 3 != 1)
        down = build.add("down", [dropped[0]], [16], 60, module=where, target="aten.mm.default")[0]
        total = build.add("add", [stream, down], [16], 1, module=where)[0]
        saved.append([stream, norm, mean, wide, active, *dropped])
        stream = total
    loss, scores = build.add("loss", [stream], [1, 80], 10)
    gradient = build.add("loss_backward", [scores, stream], [16], 10, workspace=20, backward=True)[0]
    outputs = [loss]
    for number in reversed(range(layers)):
        x, norm, mean, wide, active, dropped, kept = saved[number]
        where = f"layers.{number}"
        weight = build.add("down_weight", [dropped, gradient], [8], 60, backward=True, module=where)[0]
        inner = build.add("down_input", [gradient, kept], [64], 60, backward=True, module=where)[0]
        inner = build.add("gelu_backward", [wide, inner], [64], 5, backward=True, module=where)[0]
        other = build.add("up_weight", [norm, inner], [8], 60, backward=True, module=where)[0]
        inner = build.add("norm_backward", [x, mean, inner], [16], 4, backward=True, module=where)[0]
        gradient = build.add("sum", [gradient, inner], [16], 1, backward=True, module=where)[0]
        outputs += [weight, other]
    return build.problem(outputs, "transformer", resident=32)


def layered(seed: int, layers: int = 6, width: int = 3) -> Problem:
    """Random layers with random reads, mirrored; some ops have two outputs, some run once, some values are empty."""
    rng = random.Random(seed)
    build = Builder()
    rows = [[build.add("input", [], [rng.randint(1, 20)], rng.randint(0, 5))[0]]]
    for layer in range(layers):
        reads = [value for row in rows[-2:] for value in row]
        row: list[int] = []
        for column in range(rng.randint(1, width)):
            inputs = rng.sample(reads, min(len(reads), rng.randint(1, 3)))
            sizes = [rng.choice((0, 5, 10, 20, 40)) for _ in range(rng.choice((1, 1, 2)))]
            flags = {"workspace": rng.choice((0, 0, 5)), "recomputable": rng.random() > 0.1}
            row += build.add(f"f{layer}_{column}", inputs, sizes, rng.randint(1, 30), **flags)
        rows.append(row)
    gradients = build.add("loss", rows[-1], [5], 2, backward=True)
    for row in reversed(rows):
        gradients = build.add("backward", [*row, *gradients[-2:]], [rng.randint(1, 30)], 10, backward=True)
    return build.problem(gradients, f"layered{seed}", resident=rng.randint(0, 20))


def tiny(seed: int, count: int = 7) -> Problem:
    """A random graph small enough for brute force."""
    rng = random.Random(seed)
    build = Builder()
    values: list[int] = []
    for number in range(count):
        inputs = rng.sample(values, min(len(values), rng.randint(0, 2)))
        if values and rng.random() < 0.5:
            inputs.append(values[-1])
        sizes = [rng.randint(0, 9) for _ in range(rng.choice((1, 1, 1, 2)))]
        flags = {"workspace": rng.choice((0, 0, 3)), "recomputable": rng.random() > 0.15}
        values += build.add(f"op{number}", inputs, sizes, rng.randint(1, 9), backward=number > count // 2, **flags)
    return build.problem(rng.sample(values, 1), f"tiny{seed}", resident=rng.choice((0, 5)))


def overwriting(problem: Problem, seed: int) -> Problem:
    """The same problem where ops of one output may overwrite inputs, which take as many bytes for it."""
    rng = random.Random(seed)
    sizes, ops = list(problem.costs.size_bytes), list(problem.graph.ops)
    kept = set(problem.graph.outputs)
    alike: dict[int, int] = {}
    for number, op in enumerate(ops):
        free = [value for value in op.inputs if value not in kept]
        if len(op.outputs) == 1 and free and rng.random() < 0.7:
            chosen = rng.choice(free)
            alike[op.outputs[0]] = alike.get(chosen, chosen)
            ops[number] = replace(op, overwrites=(chosen,))
    for value, other in alike.items():
        sizes[value] = sizes[other]
    graph = replace(problem.graph, ops=tuple(ops))
    return replace(problem, graph=graph, costs=replace(problem.costs, size_bytes=tuple(sizes)))


def awkward() -> list[Problem]:
    """What solvers may trip over: one op, no backward or only backward, separate parts, empty values and free ops."""
    one, ahead, back, apart, free = Builder(), Builder(), Builder(), Builder(), Builder()
    one.add("only", [], [5, 3], 2, workspace=1)
    values = ahead.add("first", [], [9], 1)
    for number in range(9):
        values += ahead.add("next", values[-2:], [number + 1], 3)
    values = back.add("first", [], [9], 1, backward=True)
    for _ in range(5):
        values += back.add("next", values[-2:], [4], 2, backward=True)
    for _ in range(3):
        value = apart.add("forward", [], [7], 4)[0]
        apart.add("backward", apart.add("inner", [value], [2], 1) + [value], [1], 2, backward=True)
    for time, size in ((0.0, 0), (0.0, 6), (3.0, 0), (0.0, 6)):
        free.add("forward", [], [size], time)
    free.add("backward", [0, 1, 2], [0], 0.0, backward=True)
    free.add("backward", [1, 3], [4], 0.0, backward=True)
    return [
        one.problem([0], "one op"),
        ahead.problem([9], "no backward"),
        back.problem([5], "only backward"),
        apart.problem([2, 5], "disconnected"),
        free.problem([5], "no sizes or times"),
    ]


def mixed(seed: int) -> Problem:
    """A random graph small enough for brute force, with everything a problem may have: several outputs of the graph and
    of its ops, values without bytes, ops without time, ops that run once, workspace and resident bytes."""
    rng = random.Random(seed)
    build = Builder()
    values: list[int] = []
    for number in range(rng.randint(4, 8)):
        inputs = rng.sample(values, min(len(values), rng.randint(0, 3)))
        if values and rng.random() < 0.4:
            inputs.append(values[-1])
        sizes = [rng.choice((0, 1, 2, 4, 7)) for _ in range(rng.choice((1, 1, 2, 3)))]
        flags = {"workspace": rng.choice((0, 0, 0, 2, 5)), "recomputable": rng.random() > 0.1}
        values += build.add(f"op{number}", inputs, sizes, rng.choice((0, 1, 2, 3, 5, 8)), **flags)
    outputs = rng.sample(values, min(len(values), rng.randint(0, 2)))
    return build.problem(outputs, f"mixed{seed}", resident=rng.choice((0, 3)))


def peak(problem: Problem) -> int:
    """The peak of the plain schedule."""
    return simulate(problem, plain_schedule(problem.graph)).peak_bytes


def squeezed(problem: Problem, share: float) -> Problem:
    """The problem with `share` of its plain peak as the budget."""
    return problem.with_budget(int(share * peak(problem)))


def small_problems(seeds: range) -> Iterator[Problem]:
    """Random problems, each under two budgets that plain does not fit."""
    for seed in seeds:
        for problem in (tiny(seed, 7 + seed % 2), mixed(seed)):
            for share in (0.9, 0.75):
                yield squeezed(problem, share)
