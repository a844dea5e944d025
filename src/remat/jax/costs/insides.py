"""What a scan takes, told from its body.

In: a scan's equation. Out: its time, length times that of one iteration, and its workspace: the most that is alive
while an iteration runs. Compiling each scan to see would take longer than everything else in planning.
"""

from __future__ import annotations

from typing import Any

from remat.core.problem import Problem
from remat.core.schedule import plain_schedule
from remat.core.simulate import simulate
from remat.jax.costs.op_costs import measured_costs
from remat.jax.costs.timing import Stopwatch, Timed
from remat.jax.graph.contract import contract
from remat.jax.graph.program import program_of


def scan_cost(params: dict[str, Any], watch: Stopwatch) -> Timed:
    """Of all iterations."""
    contracted = contract(program_of(params["jaxpr"]))
    costs = measured_costs(contracted, watch, with_results=True)
    problem = Problem(contracted.graph, costs, 0)
    timeline = simulate(problem, plain_schedule(contracted.graph))
    return Timed(timeline.time_ns * params["length"], timeline.peak_bytes)
