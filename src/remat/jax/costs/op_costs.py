"""What every op of a contracted program costs.

In: a `FusedGraph` and a device. Out: `Costs`. Kernels of their own are timed; fused ones take as long as moving their
bytes or computing their functions, whichever is longer. What leaves the step has its own memory from the start, as XLA
counts it, so such values take nothing here and are resident.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from remat.core.problem import Costs
from remat.jax import _compat
from remat.jax.costs.timing import Rates, Stopwatch, Timed
from remat.jax.graph.contract import FusedGraph, Work
from remat.jax.graph.primitives import DEAR, FUSED, SUMS
from remat.jax.graph.program import Constant, Equation, StepProgram

WITH_INSIDES = ("scan", "while", "cond", "sort", "conv_general_dilated")
"""Equations that work in memory of their own."""


def measured_costs(contracted: FusedGraph, watch: Stopwatch, *, with_results: bool = False) -> Costs:
    """Times of the ops, and bytes of their values; those of results only on request."""
    found = [_op_cost(contracted.program, work, watch) for work in contracted.work]
    sizes = value_sizes(contracted, with_results=with_results)
    return Costs(tuple(item.time_ns for item in found), tuple(item.workspace_bytes for item in found), sizes)


def value_sizes(contracted: FusedGraph, *, with_results: bool = False) -> tuple[int, ...]:
    """Bytes of each value; none of results, unless asked for: those are counted as resident."""
    program = contracted.program
    outputs = set() if with_results else {contracted.number_of[value] for value in contracted.graph.outputs}
    counted_elsewhere = outputs | _written_in_place(program, outputs)
    return tuple(0 if number in counted_elsewhere else program.bytes_of(number) for number in contracted.number_of)


def _written_in_place(program: StepProgram, outputs: set[int]) -> set[int]:
    """What a loop carries on from another and leaves as a result of the step: it lies where the result does."""
    readers = Counter(number for equation in program.equations for number in equation.reads)
    found = set(outputs)
    for equation in reversed(program.equations):
        if equation.primitive.name == "scan":
            first, count = _compat.scan_parts(equation.params)
            carried = zip(equation.inputs[first : first + count], equation.outputs[:count], strict=True)
            found.update(
                before
                for before, after in carried
                if after in found and not isinstance(before, Constant) and readers[before] == 1
            )
    return found


def resident_bytes(program: StepProgram, wanted: Sequence[bool]) -> tuple[tuple[str, int], ...]:
    """What the step holds from its start to its end, by class; what is differentiated is called parameters."""
    ends = {atom for atom in program.results if not isinstance(atom, Constant)}
    gradients = {atom for atom in program.gradients if not isinstance(atom, Constant)} - ends
    moving = dict(zip(program.arguments, wanted, strict=False))
    return (
        ("parameters", sum(program.bytes_of(number) for number in program.arguments if moving.get(number))),
        ("inputs", sum(program.bytes_of(number) for number in program.arguments if not moving.get(number))),
        ("gradients", sum(map(program.bytes_of, gradients))),
        ("results", sum(map(program.bytes_of, ends))),
    )


def _op_cost(program: StepProgram, work: Work, watch: Stopwatch) -> Timed:
    if not work.equations:
        return Timed(0.0, 0)
    last = program.equations[work.equations[-1]]
    name = last.primitive.name
    if name in FUSED or name in SUMS:
        return Timed(watch.rates.kernel_ns + _fused_ns(program, work, watch.rates), 0)
    alone = _alone(program, last, watch)
    before = [program.equations[number] for number in work.equations[:-1]]
    time = watch.rates.kernel_ns + _functions_ns(program, before, watch.rates) + alone.time_ns
    return Timed(time, alone.workspace_bytes if name in WITH_INSIDES else 0)


def _alone(program: StepProgram, equation: Equation, watch: Stopwatch) -> Timed:
    if equation.primitive.name in _compat.BODIES:
        from remat.jax.costs.insides import cost_inside

        return cost_inside(equation.primitive.name, equation.params, watch)
    return watch.timed(program, equation) or Timed(_roofline_ns(program, equation, watch.rates), 0)


def equation_ns(program: StepProgram, equation: Equation, watch: Stopwatch) -> float:
    """One equation by itself; what is fused takes what its functions do, and the writing of its result."""
    if equation.primitive.name in FUSED:
        written = sum(map(program.bytes_of, equation.outputs)) / watch.rates.bytes_per_ns
        return max(written, _functions_ns(program, [equation], watch.rates))
    return watch.rates.kernel_ns + _alone(program, equation, watch).time_ns


def _fused_ns(program: StepProgram, work: Work, rates: Rates) -> float:
    moved = sum(map(program.bytes_of, (*work.reads, *work.makes)))
    equations = [program.equations[number] for number in work.equations]
    return max(moved / rates.bytes_per_ns, _functions_ns(program, equations, rates))


def _functions_ns(program: StepProgram, equations: list[Equation], rates: Rates) -> float:
    dear = (equation for equation in equations if equation.primitive.name in DEAR)
    return sum(program.avals[equation.outputs[0]].size for equation in dear) / rates.dear_per_ns


def _roofline_ns(program: StepProgram, equation: Equation, rates: Rates) -> float:
    moved = sum(map(program.bytes_of, (*equation.reads, *equation.outputs)))
    return max(moved / rates.bytes_per_ns, _flops(program, equation) / rates.flops_per_ns)


def _flops(program: StepProgram, equation: Equation) -> float:
    if not equation.outputs:
        return 0.0
    made = program.avals[equation.outputs[0]]
    name, shapes = equation.primitive.name, [_shape_of(program, atom) for atom in equation.inputs]
    if name == "dot_general":
        (contracting, _), _ = equation.params["dimension_numbers"]
        return 2.0 * float(made.size) * math.prod(shapes[0][axis] for axis in contracting)
    if name == "conv_general_dilated":
        features = equation.params["dimension_numbers"].rhs_spec[0]
        return 2.0 * float(made.size) * math.prod(shapes[1]) / max(1, shapes[1][features])
    return float(made.size)


def _shape_of(program: StepProgram, atom: Any) -> tuple[int, ...]:
    return () if isinstance(atom, Constant) else tuple(program.avals[atom].shape)
