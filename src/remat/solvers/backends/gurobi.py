"""Gurobi, from `remat[gurobi]`. Without a licence of its own it takes programs of up to 2,000 rows and columns."""

from __future__ import annotations

from remat.core.search.limits import Limits
from remat.errors import MissingExtra
from remat.solvers.backends.licence import TooLarge
from remat.solvers.backends.program import INFINITY, NO_POINT, MixedIntegerProgram, Point, ProgramAnswer


def solve_with_gurobi(program: MixedIntegerProgram, limits: Limits, start: Point = NO_POINT) -> ProgramAnswer:
    try:
        import gurobipy
    except ImportError as error:
        raise MissingExtra("Solving with Gurobi needs gurobipy; install `remat[gurobi]`.") from error
    status = gurobipy.GRB
    # An environment of its own: whatever the caller does with Gurobi keeps its settings.
    with gurobipy.Env(params={"OutputFlag": 0}) as environment, gurobipy.Model(env=environment) as model:
        model.setParam("Threads", 1)
        model.setParam("Seed", limits.seed)
        model.setParam("TimeLimit", max(limits.time_limit_s, 0.01))
        model.setParam("MIPGap", limits.gap)
        kinds = ["I" if whole else "C" for whole in program.integer]
        added = model.addVars(
            range(len(program.cost)), lb=program.lower, ub=program.upper, obj=program.cost, vtype=kinds
        )
        columns = list(added.values())
        for row, factors, sense, limit in program.rows():
            model.addLConstr(gurobipy.LinExpr(factors, [columns[column] for column in row]), sense, limit)
        for column, value in start.items():
            columns[column].Start = value
        try:
            model.optimize()
        except gurobipy.GurobiError as error:
            if error.errno == status.Error.SIZE_LIMIT_EXCEEDED:
                raise TooLarge("Gurobi's licence does not allow a program of this size") from error
            raise
        if model.Status in (status.INFEASIBLE, status.INF_OR_UNBD):
            return ProgramAnswer(None, INFINITY, complete=True)
        point = tuple(column.X for column in columns) if model.SolCount else None
        return ProgramAnswer(point, max(float(model.ObjBound), 0.0), model.Status == status.OPTIMAL)
