"""Choices worth compiling and timing against each other.

In: a joint graph, what kernels cost, the bytes that the step may add. Out: named choices that are predicted to fit, the
most promising first: the solver's own, its answers where fused kernels are dearer or cheaper than thought, torch's cut,
and what people do by hand: keep every matmul and attention, or only what goes from block to block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from remat.errors import InfeasibleBudget
from remat.inductor.model.choose import Choice, given
from remat.inductor.model.joint import Joint
from remat.inductor.model.policies import block_inputs, matmuls
from remat.inductor.model.program import MeasuredRates

DEARER = (3.0, 0.4)
"""Factors on what moving bytes in fused kernels costs."""

Solve = Callable[[Joint, MeasuredRates], Choice]


def candidates(
    joint: Joint, rates: MeasuredRates, budget_bytes: int, solve: Solve, saved_by_torch: frozenset[int]
) -> Iterator[tuple[str, Choice]]:
    """See the module's docstring; each comes when it is asked for. `saved_by_torch` is empty where it is not known."""
    seen: set[frozenset[int]] = set()

    def fits(choice: Choice) -> bool:
        is_new = choice.saved not in seen
        seen.add(choice.saved)
        return is_new and choice.prediction.peak_bytes <= budget_bytes

    own = solve(joint, rates)
    if fits(own):
        yield "solver", own
    for name, saved in (
        *([("torch's cut", saved_by_torch)] if saved_by_torch else []),
        ("matmuls and attention kept", matmuls(joint)),
        ("blocks' inputs kept", block_inputs(joint)),
    ):
        choice = replace(given(joint, rates, saved | joint.kept), is_default=name == "torch's cut")
        if fits(choice):
            yield name, choice
    for factor in DEARER:
        try:
            other = solve(joint, replace(rates, bytes_per_ns=rates.bytes_per_ns / factor))
        except InfeasibleBudget:
            continue
        choice = replace(other, prediction=given(joint, rates, other.saved).prediction)
        if fits(choice):
            yield f"solver, fused kernels {factor:g}x as dear", choice
