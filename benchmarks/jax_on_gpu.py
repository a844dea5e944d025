"""GPT-2 medium in plain JAX on one GPU, bf16: plain, two usual ways to checkpoint, and planned at the peaks of both.

    python -m benchmarks.bench_jax --gpu [--parts order unrolled scanned] [--seconds 280] [--output FILE]

First a question: does XLA keep a schedule in its order? A small network is compiled under one schedule with barriers,
with conditionals and with nothing between its segments; what the model predicts is the answer of a compiler that does.
Then the network, its layers written out, and scanned. After each way the file is written; none is begun without time.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tests.support import jax_models

import remat.jax
from remat.core.schedule import plain_schedule
from remat.core.simulate import simulate
from remat.errors import InfeasibleBudget
from remat.jax.costs.compiled import compile_step, memory_of
from remat.jax.graph.leaves import Leaves
from remat.jax.loop import Asked, model_of, replayed, solve_within
from remat.jax.planning import FlatFunction, step_of
from remat.jax.run.hold import Means

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """GPT-2 medium by default."""

    layers: int = 24
    width: int = 1024
    heads: int = 16
    vocabulary: int = 50257
    batch: int = 16
    length: int = 1024


SMALL = Sizes(layers=4, width=64, heads=4, vocabulary=512, batch=2, length=128)


@dataclass(slots=True)
class Clock:
    """How much of the time is left, and what is written down."""

    seconds: float
    output: Path
    began: float = field(default_factory=time.perf_counter)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def spent_s(self) -> float:
        return time.perf_counter() - self.began

    def note(self, **row: Any) -> None:
        self.rows.append({**row, "at_s": round(self.spent_s, 1)})
        print(json.dumps(self.rows[-1]), flush=True)
        self.output.write_text(json.dumps(self.rows, indent=1) + "\n")

    def has(self, seconds: float) -> bool:
        return self.spent_s + seconds < self.seconds


def parameters_of(sizes: Sizes, scanned: bool) -> dict[str, Any]:
    width, keys = sizes.width, iter(jax.random.split(jax.random.key(0), 16))

    def new(*shape: int) -> Any:
        return (jax.random.normal(next(keys), shape) * 0.02).astype(jnp.bfloat16)

    stacked = {
        "qkv": new(sizes.layers, width, 3 * width),
        "out": new(sizes.layers, width, width),
        "up": new(sizes.layers, width, 4 * width),
        "down": new(sizes.layers, 4 * width, width),
        **{name: jnp.ones((sizes.layers, width), jnp.bfloat16) for name in ("first", "second")},
    }
    each = [jax.tree.map(lambda rows: rows[number], stacked) for number in range(sizes.layers)]  # noqa: B023
    return {
        "words": new(sizes.vocabulary, width),
        "places": new(sizes.length, width),
        "last": jnp.ones(width, jnp.bfloat16),
        "layers": stacked if scanned else each,
    }


def norm(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    spread = ((wide - mean) ** 2).mean(-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(spread + 1e-5)).astype(x.dtype) * scale


def block(heads: int, layer: Any, x: Any) -> Any:
    batch, length, width = x.shape
    parts = jnp.split(norm(x, layer["first"]) @ layer["qkv"], 3, -1)
    q, k, v = (part.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3) for part in parts)
    scores = (q @ k.transpose(0, 1, 3, 2)).astype(jnp.float32) / math.sqrt(width // heads)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jax.nn.softmax(scores, -1).astype(x.dtype) @ v
    x = x + mixed.transpose(0, 2, 1, 3).reshape(batch, length, width) @ layer["out"]
    return x + jax.nn.gelu(norm(x, layer["second"]) @ layer["up"]) @ layer["down"]


def loss_of(sizes: Sizes, scanned: bool, wrap: Callable[[Any], Any] = lambda run: run) -> Callable[..., Any]:
    run = wrap(partial(block, sizes.heads))

    def loss(parameters: Any, tokens: Any) -> Any:
        x = parameters["words"][tokens] + parameters["places"]
        if scanned:
            x, _ = jax.lax.scan(lambda x, layer: (run(layer, x), None), x, parameters["layers"])
        else:
            for number, layer in enumerate(parameters["layers"]):
                with jax.named_scope(f"layers.{number}"):
                    x = run(layer, x)
        logits = (norm(x, parameters["last"]) @ parameters["words"].T).astype(jnp.float32)
        return jax_models.cross_entropy(logits[:, :-1], tokens[:, 1:])

    return loss


USUAL = ("checkpoint per block", "dots with no batch dims")


def wrappers() -> dict[str, Callable[[Any], Any]]:
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    usual = jax.checkpoint, partial(jax.checkpoint, policy=dots)
    return {"plain": lambda run: run, **dict(zip(USUAL, usual, strict=True))}


def ask_order(clock: Clock, small: bool) -> None:
    """One schedule of a small network, held by each of the means."""
    sizes = dict(layers=3, length=64) if small else dict(layers=8, width=256, length=512, batch=8)
    loss, parameters, batch = jax_models.gpt(**sizes)
    leaves = Leaves.of((parameters, *batch), {})
    options = remat.jax.compiler_options()
    step = step_of(FlatFunction(loss, leaves, False), leaves.chosen((0,)), options)
    model = model_of(step)
    plain = simulate(model.problem, plain_schedule(model.contracted.graph)).peak_bytes - model.resident_total
    for share in (1.0, 0.5, 0.3):
        solution = solve_within(model, int(share * plain), Asked(time_limit_s=2.0))
        assert solution.schedule is not None
        row = {"question": "order", "share": share, "ops": len(model.contracted.graph.ops)}
        row["predicted_mib"] = (solution.peak_bytes - model.resident_total) / MIB
        for means in Means:
            pull = replayed(model.replay(solution.schedule), means)
            compiled = compile_step(pull, step.avals, model.cotangents(), options)
            row[f"{means.value}_mib"] = memory_of(compiled).temporary_bytes / MIB
            row[f"{means.value}_ms"] = 1e3 * fastest(partial(compiled, *leaves.arrays), 5)
        clock.note(**row)


def fastest(run: Callable[[], Any], rounds: int) -> float:
    jax.block_until_ready(run())
    best = math.inf
    for _ in range(rounds):
        began = time.perf_counter()
        jax.block_until_ready(run())
        best = min(best, time.perf_counter() - began)
    return best


def timed(step: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Milliseconds of a step, or why it does not run."""
    try:
        return {"ms": 1e3 * fastest(partial(step, *arguments), 5)}
    except jax.errors.JaxRuntimeError as error:
        return {"ms": None, "failed": str(error).splitlines()[0][:200]}


def compiled_step(loss: Any, arguments: tuple[Any, ...]) -> tuple[Any, float]:
    began = time.perf_counter()
    step = jax.jit(jax.value_and_grad(loss), compiler_options=remat.jax.compiler_options())
    return step.lower(*arguments).compile(), time.perf_counter() - began


def temporaries(step: Any) -> int:
    return int(memory_of(step).temporary_bytes)


def compare(clock: Clock, sizes: Sizes, scanned: bool, seconds_each: float) -> None:
    """Each usual way, planned at its temporaries right after it; then at half of the leanest's; plain at last."""
    arguments = (parameters_of(sizes, scanned), jax_models.words(sizes.batch, sizes.length, sizes.vocabulary))
    kind, peaks = "scanned" if scanned else "unrolled", []

    def usual(name: str) -> int:
        step, seconds = compiled_step(loss_of(sizes, scanned, wrappers()[name]), arguments)
        row = dict(kind=kind, way=name, temporary_mib=temporaries(step) / MIB, compile_s=seconds)
        clock.note(**row, **timed(step, arguments))
        return temporaries(step)

    for name in USUAL:
        if clock.has(seconds_each):
            peaks.append(usual(name))
            if clock.has(3 * seconds_each):
                planned(clock, sizes, scanned, name, peaks[-1], arguments)
    if peaks and clock.has(3 * seconds_each):
        planned(clock, sizes, scanned, "half of the leanest", min(peaks) // 2, arguments)
    if clock.has(seconds_each):
        usual("plain")


def planned(clock: Clock, sizes: Sizes, scanned: bool, name: str, allowed: int, arguments: tuple[Any, ...]) -> None:
    loss = loss_of(sizes, scanned)
    results = jax.eval_shape(jax.value_and_grad(loss), *arguments)
    resident = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((arguments, results)))
    row = {"kind": "scanned" if scanned else "unrolled", "way": f"planned at {name}", "budget_mib": allowed / MIB}
    optimized = remat.jax.optimize(loss, int(resident + allowed))
    began = time.perf_counter()
    try:
        prepared = optimized.plan_for(*arguments)
    except InfeasibleBudget as error:
        clock.note(**row, refused=str(error), planning_s=time.perf_counter() - began)
        return
    row["planning_s"] = time.perf_counter() - began
    step, row["compile_s"] = compiled_step(optimized, arguments)
    plan = prepared.plan
    clock.note(
        **row,
        temporary_mib=temporaries(step) / MIB,
        used=temporaries(step) / allowed,
        predicted_mib=(plan.predicted_peak - sum(size for _, size in plan.breakdown_bytes)) / MIB,
        compilations=prepared.compilations,
        modelled_overhead=plan.overhead,
        gap=plan.gap,
        **timed(step, arguments),
    )


PARTS: dict[str, Callable[[Clock, Sizes, bool], None]] = {
    "order": lambda clock, sizes, small: ask_order(clock, small),
    "unrolled": lambda clock, sizes, small: compare(clock, sizes, False, 2.0 if small else 20.0),
    "scanned": lambda clock, sizes, small: compare(clock, sizes, True, 2.0 if small else 8.0),
}


def run(seconds: float, output: Path, small: bool, parts: Sequence[str]) -> None:
    device = jax.devices()[0]
    clock = Clock(seconds, output)
    clock.note(device=device.device_kind, jax=jax.__version__, platform=device.platform)
    for part in parts:
        PARTS[part](clock, SMALL if small else Sizes(), small)
