"""Losses of JAX under budgets, beside plain jax and `jax.checkpoint` around each block, in the same run.

    python -m benchmarks.bench_jax [--cases gpt scanned …] [--layers 12] [--shares 0.5] [--rounds 9] [--output FILE]
    python -m benchmarks.bench_jax --peers [--cases mixer gru …] [--rounds 9] [--output FILE]
    python -m benchmarks.bench_jax --gpu [--parts order unrolled scanned] [--seconds 280] [--output FILE]

Temporary memory is XLA's own account of the compiled step, under the same compiler options for all. Times are the
fastest of interleaved rounds. "used" is of the budget; gradients are compared with those of plain jax. What planning
takes beside XLA's compilations is CPU time. `--peers` plans models that nothing was tuned for, written out and scanned,
in f32 and bf16, at what `jax.checkpoint` around each block needs. `--gpu` is for a machine with one: see
`jax_on_gpu.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from benchmarks.runs import save_results
from tests.support import jax_blocks, jax_models

import remat.jax
from remat.errors import InfeasibleBudget

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
    cpu_s: float = 0.0
    """Of the processors, for a step; the least of the rounds, as `seconds`."""
    planning_s: float = 0.0
    """Of the processors, without XLA's compilations."""
    compilations: int = 0
    difference: float = 0.0
    """The largest of a gradient, relative to its size."""
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    compiled: Any
    budget_mib: float = 0.0
    planning_s: float = 0.0
    compilations: int = 0
    difference: float = 0.0
    refused: str = ""


@dataclass(slots=True)
class Compiling:
    """CPU time that goes into XLA's compilations, while the context lasts."""

    cpu_s: float = 0.0
    _plain: Any = None

    def __enter__(self) -> Compiling:
        plain = self._plain = jax.stages.Lowered.compile

        def compile(lowered: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return plain(lowered, *args, **kwargs)
            finally:
                self.cpu_s += time.process_time() - began

        jax.stages.Lowered.compile = compile
        return self

    def __exit__(self, *_: object) -> None:
        jax.stages.Lowered.compile = self._plain


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
    optimized = remat.jax.optimize(loss, int(resident + allowed * MIB))
    began = time.process_time()
    try:
        with Compiling() as compiling:
            prepared = optimized.plan_for(*arguments)
    except InfeasibleBudget as error:
        return Way(name, None, allowed, refused=str(error))
    planning_s = time.process_time() - began - compiling.cpu_s
    step = compiled(optimized, arguments)
    difference = distance(expected, step(*arguments))
    return Way(name, step, allowed, planning_s, prepared.compilations, difference)


def distance(left: Any, right: Any) -> float:
    """The largest difference in an array relative to its largest number, or to a thousandth of the largest of all."""
    pairs = list(zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))
    pairs = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs]
    most = max(float(abs(a).max()) for a, _ in pairs)
    return max(float(abs(a - b).max()) / max(float(abs(a).max()), 1e-3 * most) for a, b in pairs)


def rows_of(case: str, layers: int, rounds: int, shares: Sequence[float] | None = None) -> list[Row]:
    """At the case's own shares of plain's temporaries and beside `jax.checkpoint`, or at the given shares alone."""
    loss, parameters, batch = build(case, layers)
    arguments = (parameters, *batch)
    ways = [Way("plain", compiled(loss, arguments))]
    if shares is None and case in ("gpt", "scanned"):
        ways.append(Way("checkpoint per block", compiled(build(case, layers, checkpoint=True)[0], arguments)))
    plain = ways[0].compiled
    if len(ways) > 1:
        ways.append(planned(loss, arguments, temporary_mib(ways[1].compiled), plain, "planned as checkpoint"))
    whole = temporary_mib(plain)
    ways += [planned(loss, arguments, share * whole, plain, f"planned {share}x") for share in shares or SHARES[case]]
    return timed(case, ways, arguments, rounds)


def peer_rows_of(case: str, rounds: int) -> list[Row]:
    """Written out and scanned, in two precisions: each beside what `jax.checkpoint` per block needs and takes."""
    rows: list[Row] = []
    for scanned in (False, True):
        for dtype in (jnp.float32, jnp.bfloat16):
            model = jax_blocks.MODELS[case](scanned, dtype)
            name = f"{case}, {'scanned' if scanned else 'written out'}, {jnp.dtype(dtype).name}"
            usual = [Way("plain", compiled(model.plain, model.arguments))]
            usual.append(Way("checkpoint per block", compiled(model.checkpointed, model.arguments)))
            allowed = temporary_mib(usual[1].compiled)
            ours = planned(model.plain, model.arguments, allowed, usual[0].compiled, "planned as checkpoint")
            rows += timed(name, [*usual, ours], model.arguments, rounds)
    return rows


def timed(case: str, ways: list[Way], arguments: tuple[Any, ...], rounds: int) -> list[Row]:
    best, least = [float("inf")] * len(ways), [float("inf")] * len(ways)
    for _ in range(rounds):
        for place, way in enumerate(ways):
            if way.compiled is not None:
                began, spent = time.perf_counter(), time.process_time()
                jax.block_until_ready(way.compiled(*arguments))
                best[place] = min(best[place], time.perf_counter() - began)
                least[place] = min(least[place], time.process_time() - spent)
    return [_row(case, *found) for found in zip(ways, best, least, strict=True)]


def _row(case: str, way: Way, seconds: float, cpu_s: float) -> Row:
    if way.compiled is None:
        return Row(case, way.name, way.budget_mib, 0.0, 0.0, refused=way.refused)
    mib, rest = temporary_mib(way.compiled), (way.planning_s, way.compilations, way.difference)
    return Row(case, way.name, way.budget_mib, mib, seconds, cpu_s, *rest)


def line_of(row: Row) -> str:
    if row.refused:
        return f"{row.case:8} {row.way:20} refused: {row.refused}"
    used = f"{row.temporary_mib / row.budget_mib:6.1%}" if row.budget_mib else "      "
    return (
        f"{row.case:8} {row.way:20} {row.temporary_mib:8.2f} MiB  used {used}  {1e3 * row.seconds:8.1f} ms  "
        f"{1e3 * row.cpu_s:8.1f} ms of CPU  planned in {row.planning_s:5.1f} s beside {row.compilations} compilations, "
        f"gradients differ by {row.difference:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=[*SHARES, *jax_blocks.MODELS], help="All by default.")
    parser.add_argument(
        "--peers", action="store_true", help="At what jax.checkpoint needs, models nothing was tuned for."
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--shares", type=float, nargs="*", help="Of plain's temporaries; by default those of each case."
    )
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
    for case in options.cases or (jax_blocks.MODELS if options.peers else SHARES):
        if options.peers:
            found = peer_rows_of(case, options.rounds)
        else:
            found = rows_of(case, options.layers, options.rounds, options.shares)
        print("\n".join(map(line_of, found)), flush=True)
        rows += found
    name = "jax_peers.json" if options.peers else "jax.json"
    save_results(options.output or results / name, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
