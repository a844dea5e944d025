"""The nouns of Remat and what can be said of them without a framework: standard library and numpy only."""

from __future__ import annotations

from remat.core.budget import Budget, BudgetUnit, format_bytes, parse_budget
from remat.core.files.plan_file import graph_hash, load_plan, save_plan
from remat.core.files.problem_file import Instance, load_instance, load_problem, save_instance, save_problem
from remat.core.graph import Graph, Op, OpId, ValueId
from remat.core.problem import Costs, Problem, floor_bytes, op_need_bytes
from remat.core.results.plan import Fingerprint, Plan
from remat.core.schedule import Schedule, plain_schedule
from remat.core.simulate import Timeline, simulate
from remat.core.solution import Solution, Status
from remat.core.validate import naive_peak_bytes, validate

__all__ = [
    "Budget",
    "BudgetUnit",
    "Costs",
    "Fingerprint",
    "Graph",
    "Instance",
    "Op",
    "OpId",
    "Plan",
    "Problem",
    "Schedule",
    "Solution",
    "Status",
    "Timeline",
    "ValueId",
    "floor_bytes",
    "format_bytes",
    "graph_hash",
    "load_instance",
    "load_plan",
    "load_problem",
    "naive_peak_bytes",
    "op_need_bytes",
    "parse_budget",
    "plain_schedule",
    "save_instance",
    "save_plan",
    "save_problem",
    "simulate",
    "validate",
]
