"""A small plan for tests of what is done with plans."""

from __future__ import annotations

from tests.contract import graphs

from remat.core import Fingerprint, Plan
from remat.solvers import solve


def small_plan(share: float = 0.6) -> Plan:
    problem = graphs.squeezed(graphs.transformer(3), share)
    return Plan(
        problem=problem,
        solution=solve(problem, time_limit_s=2.0),
        fingerprint=Fingerprint(("abc", "def"), "2.13.0", "cpu", ("float32[2, 3]",)),
        plain_peak_bytes=graphs.peak(problem),
        breakdown_bytes=(("parameters", 20), ("inputs", 12)),
    )
