"""How long equations take on the device, and how fast it is where an equation cannot be timed.

In: equations of a program. Out: nanoseconds. Each distinct equation (primitive, parameters, shapes) is compiled alone
and run a few times on zeros; what was timed once in a process is remembered. Pointwise work is told from two rates,
bytes moved and transcendental functions computed; products that could not be timed from the rate of one product.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from remat.jax import _compat
from remat.jax.costs.compiled import memory_of
from remat.jax.graph.program import Constant, Equation, StepProgram

RUNS, LEAST_S, MOST_S = 5, 2e-3, 0.3
"""Each equation runs this often, or more often until that much time has passed, or less often where it takes long."""
CPU_KERNEL_NS, GPU_KERNEL_NS = 300.0, 2000.0
CPU_S, GPU_S = 4.0, 15.0
"""At most for timing equations; on GPUs, most of it goes into compiling each."""
LARGEST_BYTES = 1 << 32
"""Inputs of more than this are not allocated to time an equation."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a nanosecond."""

    bytes_per_ns: float
    dear_per_ns: float
    """Results of exp, tanh and their like."""
    flops_per_ns: float
    start_ns: float
    """What a call takes however little it does."""
    kernel_ns: float
    """What starting one more kernel inside a compiled program takes."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One equation, compiled and run alone."""

    time_ns: float
    workspace_bytes: int


@dataclass(slots=True)
class Stopwatch:
    """Times equations until the time for that is over."""

    seconds: float
    rates: Rates
    known: dict[Any, Timed] = field(default_factory=dict)
    spent_s: float = 0.0

    def timed(self, program: StepProgram, equation: Equation) -> Timed | None:
        """None where it cannot be timed: no time left, inputs too large, or a primitive that does not run alone."""
        key = _signature(program, equation)
        if key is None or equation.runs_once:
            return None
        if key not in self.known and self.spent_s < self.seconds:
            began = time.perf_counter()
            found = _timed(program, equation)
            self.spent_s += time.perf_counter() - began
            if found is None:
                return None
            self.known[key] = replace(found, time_ns=max(found.time_ns - self.rates.start_ns, 0.0))
        return self.known.get(key)


_remembered: dict[str, dict[Any, Timed]] = {}


def stopwatch(device: Any, seconds: float | None = None) -> Stopwatch:
    """One that remembers what was timed on this device in this process."""
    usual = CPU_S if device.platform == "cpu" else GPU_S
    return Stopwatch(
        usual if seconds is None else seconds, device_rates(device), _remembered.setdefault(str(device), {})
    )


def _signature(program: StepProgram, equation: Equation) -> Any:
    shapes = tuple(_shape(program, atom) for atom in equation.inputs)
    # Inner functions are compared as they are written: each trace makes new objects.
    key = (equation.primitive.name, str(sorted(equation.params.items(), key=lambda item: item[0])), shapes)
    return None if any(shape is None for shape in shapes) else key


def _shape(program: StepProgram, atom: Any) -> tuple[Any, ...] | None:
    if isinstance(atom, Constant):
        return ("literal", str(atom.value))
    aval = program.avals[atom]
    is_key = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)
    return None if is_key else (aval.shape, str(aval.dtype))


def _timed(program: StepProgram, equation: Equation) -> Timed | None:
    if sum(program.bytes_of(item) for item in equation.reads) > LARGEST_BYTES:
        return None
    numbers = equation.reads

    def run(*values: Any) -> list[Any]:
        env = dict(zip(numbers, values, strict=True))
        given = [atom.value if isinstance(atom, Constant) else env[atom] for atom in equation.inputs]
        return _compat.bind(equation.primitive, equation.params, equation.context, given)

    try:
        return run_alone(run, [program.avals[number] for number in numbers])
    except (TypeError, ValueError, NotImplementedError, jax.errors.JAXTypeError, jax.errors.JaxRuntimeError):
        # Some primitives only run inside others, or need a mesh: the roofline tells their time.
        return None


def run_alone(function: Callable[..., Any], avals: Sequence[Any]) -> Timed:
    """The least time that `function` takes on zeros, compiled, and what it works in."""
    with jax.ensure_compile_time_eval():
        values = [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
    compiled = jax.jit(function).lower(*values).compile()
    jax.block_until_ready(compiled(*values))
    least, spent, runs = math.inf, 0.0, 0
    while runs < RUNS and (spent < MOST_S or not runs) or spent < LEAST_S:
        began = time.perf_counter()
        jax.block_until_ready(compiled(*values))
        taken = time.perf_counter() - began
        least, spent, runs = min(least, taken), spent + taken, runs + 1
    return Timed(least * 1e9, memory_of(compiled).temporary_bytes)


def run_ns(function: Callable[..., Any], avals: Sequence[Any]) -> float:
    return run_alone(function, avals).time_ns


@cache
def device_rates(device: Any) -> Rates:
    """Three small measurements, once in a process for each device."""
    is_cpu = device.platform == "cpu"
    # What a processor does in a moment is too little to fill a GPU.
    count, side, dtype = (1 << 20, 512, jnp.float32) if is_cpu else (1 << 26, 4096, jnp.bfloat16)
    with jax.default_device(device):
        wide = jax.ShapeDtypeStruct((count,), jnp.float32)
        square = jax.ShapeDtypeStruct((side, side), dtype)
        start = run_ns(lambda x: x + 1, [jax.ShapeDtypeStruct((1,), jnp.float32)])
        moved = max(run_ns(lambda x: x + 1, [wide]) - start, 1.0)
        dear = max(run_ns(jnp.tanh, [wide]) - start, 1.0)
        product = max(run_ns(jnp.dot, [square, square]) - start, 1.0)
    kernel = CPU_KERNEL_NS if is_cpu else GPU_KERNEL_NS
    return Rates(8 * count / moved, count / dear, 2 * side**3 / product, start, kernel)
