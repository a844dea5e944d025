"""Mixed-integer programs, solved by HiGHS.

In: a `MixedIntegerProgram` over variables between 0 and 1 with rows that bound Σ coefficient · x. Out: a
`ProgramAnswer` with the best point found and a proven bound. HiGHS is optional: `remat[solvers]` installs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from remat.core.search.limits import Countdown, Limits
from remat.errors import MissingExtra
from remat.solvers.backends.program import INFINITY, NO_POINT, MixedIntegerProgram, Point, ProgramAnswer

__all__ = ["ProgramAnswer", "MixedIntegerProgram", "is_available", "minimise", "require_highs"]


def minimise(
    program: MixedIntegerProgram,
    limits: Limits,
    start: Point = NO_POINT,
    *,
    relaxed: bool,
    stop: Callable[[], bool] | None = None,
) -> ProgramAnswer:
    """Solve `program`, or its linear relaxation; ends early once `stop` says so.

    One thread, so that the same call gives the same answer unless time runs out first.
    """
    highspy = _highspy()
    highs = highspy.Highs()
    counts_cpu = limits.clock is time.process_time
    for option, setting in {
        "output_flag": False,
        "threads": 1,
        "random_seed": limits.seed,
        "mip_rel_gap": limits.gap,
        "mip_abs_gap": 1e-7,
        # Its own clock is the one on the wall.
        "time_limit": INFINITY if counts_cpu else max(limits.time_limit_s, 0.01),
    }.items():
        highs.setOptionValue(option, setting)
    highs.passModel(_lp(highspy, program, relaxed))
    countdown = Countdown(limits)
    if counts_cpu:
        _watch(highs, lambda: countdown.left_s() <= 0 or (stop is not None and stop()))
    elif stop is not None:
        _watch(highs, stop)
    if start and not relaxed:
        columns = np.array(list(start), dtype=np.int32)
        highs.setSolution(len(columns), columns, np.array(list(start.values()), dtype=np.float64))
    highs.run()
    status, info = highs.getModelStatus(), highs.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return ProgramAnswer(None, INFINITY, complete=True)
    has_point = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    point = tuple(highs.getSolution().col_value) if has_point else None
    optimal = status == highspy.HighsModelStatus.kOptimal
    if not relaxed:
        return ProgramAnswer(point, float(info.mip_dual_bound), optimal)
    return ProgramAnswer(point, float(info.objective_function_value) if optimal else 0.0, optimal)


def _watch(highs: Any, stop: Callable[[], bool]) -> None:
    for interrupt in (highs.cbMipInterrupt, highs.cbSimplexInterrupt):
        interrupt.subscribe(lambda event: event.interrupt(stop()))


def is_available() -> bool:
    try:
        _highspy()
    except MissingExtra:
        return False
    return True


def require_highs() -> None:
    """Raise `MissingExtra` where HiGHS is not installed."""
    _highspy()


def _highspy() -> Any:
    try:
        import highspy
    except ImportError as error:
        raise MissingExtra("Solving mixed-integer programs needs highspy; install `remat[solvers]`.") from error
    return highspy


def _lp(highspy: Any, program: MixedIntegerProgram, relaxed: bool) -> Any:
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.cost), len(program.row_lower)
    lp.col_cost_ = np.array(program.cost, dtype=np.float64)
    lp.col_lower_ = np.array(program.lower, dtype=np.float64)
    lp.col_upper_ = np.array(program.upper, dtype=np.float64)
    lp.row_lower_ = np.array(program.row_lower, dtype=np.float64)
    lp.row_upper_ = np.array(program.row_upper, dtype=np.float64)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array(program.starts, dtype=np.int32)
    lp.a_matrix_.index_ = np.array(program.columns, dtype=np.int32)
    lp.a_matrix_.value_ = np.array(program.factors, dtype=np.float64)
    if not relaxed:
        kinds = highspy.HighsVarType
        lp.integrality_ = [kinds.kInteger if whole else kinds.kContinuous for whole in program.integer]
    return lp
