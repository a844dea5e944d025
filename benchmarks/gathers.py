"""Gathers of parameters in the graph: kept, always run again, or as the plan decides, at many budgets and links."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from remat.core.graph import Graph, Op, ValueId
from remat.core.problem import Costs, Problem

LINKS = {"100 GB/s, 10 us": (100.0, 10.0), "10 GB/s, 20 us": (10.0, 20.0), "1 GB/s, 50 us": (1.0, 50.0)}
SIZES = dict(batch=8, length=64, vocabulary=64, width=128, depth=4, heads=4, dropout=0.0)


def is_gather(op: Op) -> bool:
    return "all_gather" in op.target


def kept(problem: Problem) -> Problem:
    """What ZeRO-2 does: each parameter is gathered once."""
    ops = tuple(replace(op, recomputable=False) if is_gather(op) else op for op in problem.graph.ops)
    return replace(problem, graph=replace(problem.graph, ops=ops))


def gathered_again(problem: Problem) -> Problem:
    """What ZeRO-3 does: each parameter that backward reads is gathered a second time, and not kept in between."""
    graph, costs = problem.graph, problem.costs
    times, spaces, sizes = map(list, (costs.time_ns, costs.workspace_bytes, costs.size_bytes))
    gathers = {value: number for number, op in enumerate(graph.ops) if is_gather(op) for value in op.outputs}
    ops: list[Op] = []
    new_times: list[float] = []
    new_spaces: list[int] = []
    second: dict[int, ValueId] = {}
    for number, op in enumerate(graph.ops):
        for value in op.inputs if op.backward else ():
            if value in gathers and value not in second:
                second[value] = ValueId(len(sizes))
                sizes.append(sizes[value])
                first = graph.ops[gathers[value]]
                again = replace(first, name=f"{first.name} again", outputs=(second[value],), backward=True)
                ops.append(replace(again, recomputable=False))
                new_times.append(times[gathers[value]])
                new_spaces.append(spaces[gathers[value]])
        inputs = tuple(dict.fromkeys(second.get(value, value) if op.backward else value for value in op.inputs))
        overwrites = tuple(value for value in op.overwrites if value not in second)
        runs_once = is_gather(op)
        changed = replace(op, inputs=inputs, overwrites=overwrites, recomputable=op.recomputable and not runs_once)
        ops.append(changed)
        new_times.append(times[number])
        new_spaces.append(spaces[number])
    made = Graph(tuple(ops), len(sizes), graph.outputs, graph.name)
    return replace(problem, graph=made, costs=Costs(tuple(new_times), tuple(new_spaces), tuple(sizes)))


def problem_of(ranks: int, gb_per_s: float, latency_us: float) -> Problem:
    """The step of rank 0 of so many that are only pretended."""
    from remat import zoo
    from remat.distributed import assume_link, shard
    from remat.distributed.pretended import pretended
    from remat.pytorch.run.compose import Call, compose
    from remat.pytorch.run.optimize import capture_ahead

    with pretended(ranks):
        assume_link(gb_per_s=gb_per_s, latency_us=latency_us)
        torch.manual_seed(0)
        example = zoo.build("gpt", **SIZES)
        shard(example.model)
        variant = capture_ahead(example.model, example.args, example.kwargs).calls[0].variant
        step = compose([Call(variant.captured, variant.costs())])
        resident = 4 * sum(item.numel() * item.element_size() for item in example.model.parameters())
        return Problem(step.graph, step.costs, 0, resident)


def compared(ranks: int, link: str, points: int, time_limit_s: float) -> list[dict[str, Any]]:
    """At budgets from what plain eager needs down to little: nanoseconds of each way, none where none fits."""
    from remat.core.schedule import plain_schedule
    from remat.core.simulate import simulate

    warnings.simplefilter("ignore")
    mixed = problem_of(ranks, *LINKS[link])
    ways = {"mixed": mixed, "kept": kept(mixed), "again": gathered_again(mixed)}
    top = simulate(mixed, plain_schedule(mixed.graph)).peak_bytes
    rows = []
    for share in (1 - 0.7 * place / (points - 1) for place in range(points)):
        budget = int(mixed.resident_bytes + share * (top - mixed.resident_bytes))
        found = {name: solved(problem.with_budget(budget), time_limit_s) for name, problem in ways.items()}
        row: dict[str, Any] = {"ranks": ranks, "link": link, "share": round(share, 3), "budget": budget}
        row |= {f"{name}_ns": time for name, (time, _) in found.items()}
        row["gathers_again"] = found["mixed"][1]
        others = [time for name, (time, _) in found.items() if name != "mixed" and time is not None]
        best = min(others, default=None)
        row["never_slower"] = best is None or (found["mixed"][0] is not None and found["mixed"][0] <= best * (1 + 1e-9))
        rows.append(row)
    return rows


def solved(problem: Problem, time_limit_s: float) -> tuple[float | None, int]:
    from remat.errors import InfeasibleBudget
    from remat.solvers import solve

    try:
        solution = solve(problem, "auto", time_limit_s=time_limit_s)
    except InfeasibleBudget:
        return None, 0
    if solution.schedule is None:
        return None, 0
    again = sum(count for op, count in solution.schedule.recomputed().items() if is_gather(problem.graph.ops[op]))
    return solution.time_ns, again


def trained_sharded(rank: int, share: str | None, steps: int) -> dict[str, Any]:
    """Parameters as shards over real ranks, whose gathers are ops."""
    from benchmarks.ranks.models import digest

    import remat
    from remat import zoo
    from remat.distributed import assume_link, shard

    warnings.simplefilter("ignore")
    assume_link(gb_per_s=10, latency_us=10)
    torch.manual_seed(0)
    example = zoo.build("gpt", **{**SIZES, "dropout": 0.1, "length": 32})
    shard(example.model)
    model = remat.optimize(example.model, share, time_limit=5) if share else example.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    losses = []
    for _ in range(steps):
        loss = model(*example.args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    kept = [optimizer]

    def step() -> None:
        model(*example.args).backward()
        kept[0].zero_grad()

    found: dict[str, Any] = {"losses": losses, "bits": digest(model)}
    found["peaks"] = [remat.measure(step).peak_bytes for _ in range(3)]
    if share:
        plan = remat.plan_of(model)
        ops = plan.problem.graph.ops
        again = [op for op in plan.schedule.recomputed() if is_gather(ops[op])]
        found |= {"budget": plan.budget_bytes, "predicted": plan.predicted_peak}
        found |= {"again": len(again), "gathers": sum(map(is_gather, ops))}
    return found


def resharded(rank: int, share: str) -> dict[str, Any]:
    """FSDP2's own blocks."""
    import remat
    from remat import zoo
    from remat.distributed import choose_reshard
    from remat.distributed.pretended import parallel
    from remat.pytorch.costs.collective_costs import RankLink

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    example = zoo.build("gpt", **{**SIZES, "length": 32})
    model = remat.optimize(parallel(example.model, "fsdp"), share, time_limit=2)

    def step() -> None:
        model(*example.args).backward()
        model.zero_grad()

    found = choose_reshard(model, step, link=RankLink(1e9, 20e-6))
    return {
        "link": "1 GB/s, 20 us",
        "kept": found.kept,
        "budget": found.plan.budget_bytes,
        "predicted": found.plan.predicted_peak,
        "measured": remat.measure(step).peak_bytes,
        "tried": [(item.kept, item.fits, item.time_ns, item.peak_bytes) for item in found.tried],
    }


def trained_compiled(rank: int, how: str, share: str, steps: int) -> dict[str, Any]:
    from benchmarks.ranks.models import built

    import remat
    from remat import zoo

    warnings.simplefilter("ignore")
    losses: dict[str, list[float]] = {}
    found: dict[str, Any] = {}
    for way in ("plain", "compiled"):
        torch.manual_seed(0)
        example = zoo.build("gpt", **{**SIZES, "length": 32})
        model = built(how, example.model, None if way == "plain" else share, compiler="inductor")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses[way] = []
        for _ in range(steps):
            loss = model(*example.args)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[way].append(loss.item())
        if way == "compiled":
            plan, kept = remat.plan_of(model), [optimizer]

            def step(model: Any = model, example: Any = example, kept: Any = kept) -> None:
                model(*example.args).backward()
                kept[0].zero_grad()

            found |= {"budget": plan.budget_bytes, "predicted": plan.predicted_peak}
            found["peaks"] = [remat.measure(step).peak_bytes for _ in range(2)]
            found["within_budget"] = max(found["peaks"]) <= plan.budget_bytes
    pairs = zip(losses["plain"], losses["compiled"], strict=True)
    return {**found, "largest_difference": max(abs(one - other) / abs(one) for one, other in pairs)}
