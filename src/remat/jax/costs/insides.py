"""What loops and branches take, told from what is inside of them.

In: an equation of a scan, a while or a cond. Out: its time and its workspace: the most that is alive while it runs. A
loop is not run to see: on made-up values a while may never end, and compiling each scan or branch by itself would take
longer than everything else in planning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remat.core.problem import Problem
from remat.core.schedule import plain_schedule
from remat.core.simulate import simulate
from remat.jax import _compat
from remat.jax.costs.op_costs import measured_costs
from remat.jax.costs.timing import Stopwatch, Timed
from remat.jax.graph.contract import contract
from remat.jax.graph.program import program_of

ITERATIONS = 100
"""Of a while, which nobody knows before it runs: enough that one is run again only where nothing else helps."""


def cost_inside(primitive: str, params: Mapping[str, Any], watch: Stopwatch) -> Timed:
    """Of all iterations of a loop, or of the dearest branch."""
    # What a branch makes is what the whole of it makes; rows of a loop are written into its results one by one.
    with_results = primitive != "cond"
    parts = [_once(jaxpr, watch, with_results) for jaxpr in _compat.inner_parts(primitive, params)]
    longest, most = max(part.time_ns for part in parts), max(part.workspace_bytes for part in parts)
    if primitive == "cond":
        return Timed(longest, most)
    times = params["length"] if primitive == "scan" else ITERATIONS
    return Timed(times * sum(part.time_ns for part in parts), most)


def _once(jaxpr: Any, watch: Stopwatch, with_results: bool) -> Timed:
    contracted = contract(program_of(jaxpr))
    costs = measured_costs(contracted, watch, with_results=with_results)
    timeline = simulate(Problem(contracted.graph, costs, 0), plain_schedule(contracted.graph))
    return Timed(timeline.time_ns, timeline.peak_bytes)
