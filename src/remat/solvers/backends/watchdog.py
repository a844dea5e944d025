"""HiGHS in a process of its own, ended when its time is up.

HiGHS looks at the clock between steps of its work, and one step of presolve on a large program can take half a minute.
In: a program and its limits. Out: an answer soon after the limit; empty where the process had to be ended.
Programs travel as numpy arrays through pipes. `main` is what the process runs.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remat.core.search.child_process import run_child
from remat.core.search.limits import Limits
from remat.solvers.backends.linear_highs import minimise
from remat.solvers.backends.program import NO_POINT, MixedIntegerProgram, Point, ProgramAnswer

_FIELDS = ("cost", "lower", "upper", "integer", "starts", "columns", "factors", "row_lower", "row_upper")


def minimise_watched(
    program: MixedIntegerProgram, limits: Limits, start: Point = NO_POINT, *, relaxed: bool
) -> ProgramAnswer:
    """As `minimise`, but never much longer than the limit."""
    message = {name: np.array(getattr(program, name)) for name in _FIELDS}
    message["start_columns"] = np.array(list(start), dtype=np.int64)
    message["start_values"] = np.array(list(start.values()), dtype=np.float64)
    message["limits"] = np.array([limits.time_limit_s, limits.gap, limits.seed, relaxed], dtype=np.float64)
    content = run_child(__name__, _pack(message), limits.time_limit_s)
    if content is None:
        return ProgramAnswer(None, 0.0, complete=False)
    reply = _unpack(content)
    point = tuple(reply["point"].tolist())
    return ProgramAnswer(point or None, float(reply["bound"]), bool(reply["complete"]))


def main() -> None:
    """Read a program from standard input, solve it, and write the answer to standard output."""
    message = _unpack(sys.stdin.buffer.read())
    program = MixedIntegerProgram(**{name: message[name].tolist() for name in _FIELDS})
    time_limit_s, gap, seed, relaxed = message["limits"].tolist()
    start = dict(zip(message["start_columns"].tolist(), message["start_values"].tolist(), strict=True))
    answer = minimise(program, Limits(time_limit_s, gap, int(seed)), start, relaxed=bool(relaxed))
    reply = {"point": np.array(answer.point or (), dtype=np.float64), "bound": np.array(answer.bound)}
    reply["complete"] = np.array(answer.complete)
    sys.stdout.buffer.write(_pack(reply))


def _pack(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def _unpack(content: bytes) -> dict[str, NDArray[Any]]:
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return dict(arrays)
