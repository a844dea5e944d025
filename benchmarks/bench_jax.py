"""Losses of JAX under budgets, beside plain jax and `jax.checkpoint` around each block, in the same run.

    python -m benchmarks.bench_jax [--cases gpt scanned …] [--layers 12] [--rounds 9] [--output FILE]
    python -m benchmarks.bench_jax --gpu [--parts order unrolled scanned] [--seconds 280] [--output FILE]

Temporary memory is XLA's own account of the compiled step, under the same compiler options for all. Times are the
fastest of interleaved rounds. "used" is of the budget; gradients are compared with those of plain jax. `--gpu` is for a
machine with one: see `jax_on_gpu.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from benchmarks.runs import save_results
from tests.support import jax_models

import remat.jax

MIB = 1 << 20
SHARES = {
    "gpt": (0.7, 0.5, 0.35, 0.25),
    "scanned": (0.5, 0.3, 0.2),
    "bert": (0.6,),
    "vit": (0.6,),
    "lstm": (0.6,),
    "resnet": (0.7,),
}


@dataclass(frozen=True, slots=True)
class Row:
    case: str
    way: str
    budget_mib: float
    """Of temporary memory; 0 where there is none."""
    temporary_mib: float
    seconds: float
    planning_s: float = 0.0
    compilations: int = 0
    difference: float = 0.0
    """The largest of a gradient, relative to its size."""


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    compiled: Any
    budget_mib: float = 0.0
    planning_s: float = 0.0
    compilations: int = 0
    difference: float = 0.0


def build(case: str, layers: int, **options: Any) -> jax_models.Case:
    if case == "gpt":
        return jax_models.gpt(layers=layers, **options)
    if case == "scanned":
        return jax_models.scanned_gpt(layers=layers, **options)
    makers: dict[str, Callable[[], jax_models.Case]] = {
        "bert": jax_models.bert,
        "vit": jax_models.vit,
        "lstm": jax_models.lstm,
        "resnet": jax_models.resnet,
    }
    return makers[case]()


def compiled(loss: Any, arguments: tuple[Any, ...]) -> Any:
    step = jax.jit(jax.value_and_grad(loss), compiler_options=remat.jax.compiler_options())
    return step.lower(*arguments).compile()


def temporary_mib(step: Any) -> float:
    return float(step.memory_analysis().temp_size_in_bytes) / MIB


def planned(loss: Any, arguments: tuple[Any, ...], allowed: float, plain: Any, name: str) -> Way:
    """Under so many MiB of temporaries, with arguments and results on top."""
    expected = plain(*arguments)
    resident = sum(leaf.nbytes for leaf in jax.tree.leaves((arguments, expected)))
    began = time.perf_counter()
    optimized = remat.jax.optimize(loss, int(resident + allowed * MIB))
    prepared = optimized.plan_for(*arguments)
    planning_s = time.perf_counter() - began
    step = compiled(optimized, arguments)
    difference = distance(expected, step(*arguments))
    return Way(name, step, allowed, planning_s, prepared.compilations, difference)


def distance(left: Any, right: Any) -> float:
    """The largest difference in an array relative to its largest number, or to a thousandth of the largest of all."""
    pairs = list(zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))
    most = max(float(abs(a).max()) for a, _ in pairs)
    return max(float(abs(a - b).max()) / max(float(abs(a).max()), 1e-3 * most) for a, b in pairs)


def rows_of(case: str, layers: int, rounds: int) -> list[Row]:
    loss, parameters, batch = build(case, layers)
    arguments = (parameters, *batch)
    ways = [Way("plain", compiled(loss, arguments))]
    if case in ("gpt", "scanned"):
        ways.append(Way("checkpoint per block", compiled(build(case, layers, checkpoint=True)[0], arguments)))
    plain = ways[0].compiled
    if len(ways) > 1:
        ways.append(planned(loss, arguments, temporary_mib(ways[1].compiled), plain, "planned as checkpoint"))
    whole = temporary_mib(plain)
    ways += [planned(loss, arguments, share * whole, plain, f"planned {share}x") for share in SHARES[case]]
    best = [float("inf")] * len(ways)
    for _ in range(rounds):
        for place, way in enumerate(ways):
            began = time.perf_counter()
            jax.block_until_ready(way.compiled(*arguments))
            best[place] = min(best[place], time.perf_counter() - began)
    return [
        Row(
            case,
            way.name,
            way.budget_mib,
            temporary_mib(way.compiled),
            seconds,
            way.planning_s,
            way.compilations,
            way.difference,
        )
        for way, seconds in zip(ways, best, strict=True)
    ]


def line_of(row: Row) -> str:
    used = f"{row.temporary_mib / row.budget_mib:6.1%}" if row.budget_mib else "      "
    return (
        f"{row.case:8} {row.way:20} {row.temporary_mib:8.2f} MiB  used {used}  {1e3 * row.seconds:8.1f} ms  "
        f"planned in {row.planning_s:5.1f} s, {row.compilations} compilations, gradients differ by {row.difference:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(SHARES), choices=list(SHARES))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--gpu", action="store_true", help="GPT-2 medium on one GPU instead.")
    parser.add_argument("--small", action="store_true", help="With --gpu: sizes for a try on any machine.")
    parser.add_argument("--parts", nargs="*", default=["order", "unrolled", "scanned"], help="With --gpu: what to run.")
    parser.add_argument("--seconds", type=float, default=280.0, help="With --gpu: after this, nothing more is begun.")
    options = parser.parse_args()
    results = Path(__file__).parent / "results"
    if options.gpu:
        from benchmarks import jax_on_gpu

        jax_on_gpu.run(options.seconds, options.output or results / "jax_gpu.json", options.small, options.parts)
        return
    rows: list[Row] = []
    for case in options.cases:
        found = rows_of(case, options.layers, options.rounds)
        print("\n".join(map(line_of, found)), flush=True)
        rows += found
    save_results(options.output or results / "jax.json", [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
