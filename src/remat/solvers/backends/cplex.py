"""CPLEX, from `remat[cplex]`. Without a licence of its own it takes programs of up to 1,000 rows and columns."""

from __future__ import annotations

from remat.core.search.limits import Limits
from remat.errors import MissingExtra
from remat.solvers.backends.licence import TooLarge
from remat.solvers.backends.program import INFINITY, NO_POINT, MixedIntegerProgram, Point, ProgramAnswer

_SIZE_LIMIT = 1016
"""CPXERR_RESTRICTED_VERSION: promotional version, problem size limits exceeded."""


def solve_with_cplex(program: MixedIntegerProgram, limits: Limits, start: Point = NO_POINT) -> ProgramAnswer:
    try:
        import cplex
    except ImportError as error:
        raise MissingExtra("Solving with CPLEX needs cplex; install `remat[cplex]`.") from error
    with cplex.Cplex() as model:
        for stream in (
            model.set_results_stream,
            model.set_log_stream,
            model.set_warning_stream,
            model.set_error_stream,
        ):
            stream(None)
        model.parameters.threads.set(1)
        model.parameters.randomseed.set(limits.seed)
        model.parameters.timelimit.set(max(limits.time_limit_s, 0.01))
        model.parameters.mip.tolerances.mipgap.set(limits.gap)
        kinds = "".join("I" if whole else "C" for whole in program.integer)
        model.variables.add(obj=program.cost, lb=program.lower, ub=program.upper, types=kinds)
        rows = list(program.rows())
        model.linear_constraints.add(
            lin_expr=[cplex.SparsePair(row, factors) for row, factors, _, _ in rows],
            senses="".join("L" if sense == "<" else "G" for _, _, sense, _ in rows),
            rhs=[limit for _, _, _, limit in rows],
        )
        if start:
            known = cplex.SparsePair(list(start), list(start.values()))
            model.MIP_starts.add(known, model.MIP_starts.effort_level.solve_fixed)
        try:
            model.solve()
        except cplex.exceptions.CplexSolverError as error:
            if error.args[2] == _SIZE_LIMIT:
                raise TooLarge("CPLEX's licence does not allow a program of this size") from error
            raise
        status = model.solution.status
        ended = model.solution.get_status()
        if ended in (status.MIP_infeasible, status.MIP_infeasible_or_unbounded):
            return ProgramAnswer(None, INFINITY, complete=True)
        point = tuple(model.solution.get_values()) if model.solution.is_primal_feasible() else None
        is_complete = ended in (status.MIP_optimal, status.optimal_tolerance)
        return ProgramAnswer(point, max(float(model.solution.MIP.get_best_objective()), 0.0), is_complete)
