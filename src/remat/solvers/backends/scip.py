"""SCIP, from `remat[scip]`."""

from __future__ import annotations

from remat.core.search.limits import Limits
from remat.errors import MissingExtra
from remat.solvers.backends.program import INFINITY, NO_POINT, MixedIntegerProgram, Point, ProgramAnswer


def solve_with_scip(program: MixedIntegerProgram, limits: Limits, start: Point = NO_POINT) -> ProgramAnswer:
    try:
        from pyscipopt import Model
        from pyscipopt.scip import Expr, ExprCons, Term
    except ImportError as error:
        raise MissingExtra("Solving with SCIP needs pyscipopt; install `remat[scip]`.") from error
    model = Model()
    model.hideOutput()
    model.setParam("limits/time", max(limits.time_limit_s, 0.01))
    model.setParam("limits/gap", limits.gap)
    model.setParam("randomization/randomseedshift", limits.seed)
    columns = [
        model.addVar(lb=lower, ub=upper, obj=cost, vtype="I" if whole else "C")
        for cost, lower, upper, whole in zip(program.cost, program.lower, program.upper, program.integer, strict=True)
    ]
    for row, factors, sense, limit in program.rows():
        terms = Expr({Term(columns[column]): factor for column, factor in zip(row, factors, strict=True)})
        model.addCons(ExprCons(terms, rhs=limit) if sense == "<" else ExprCons(terms, lhs=limit))
    if start:
        known = model.createPartialSol()
        for column, value in start.items():
            model.setSolVal(known, columns[column], value)
        model.addSol(known)
    model.optimize()
    if model.getStatus() == "infeasible":
        return ProgramAnswer(None, INFINITY, complete=True)
    best = model.getBestSol() if model.getNSols() else None
    point = tuple(model.getSolVal(best, column) for column in columns) if best is not None else None
    is_complete = model.getStatus() in ("optimal", "gaplimit")
    return ProgramAnswer(point, max(float(model.getDualbound()), 0.0), is_complete)
