"""The process of one configuration: reads a request, says how it went, and times steps whenever it is asked.

In: a `Request` as JSON, the only argument; then lines on standard input, each a number of steps to time. Out: one JSON
line for each, `{"ready": …}`, `{"timed": …}` or `{"failed": …}`. It ends with its input. Whatever libraries print goes
to standard error.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.frontier.rows import Status

Say = Callable[[Mapping[str, Any]], None]


def main() -> None:
    say = _private_output()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("remat").setLevel(logging.INFO)
    try:
        _serve(json.loads(sys.argv[1]), say)
    except Exception as error:
        # Whatever went wrong is this configuration's result; the run goes on.
        traceback.print_exc()
        say({"failed": {"status": _status_of(error), "reason": _first_line(error)}})


def _serve(fields: dict[str, Any], say: Say) -> None:
    # torch and transformers are slow to import: a failure of theirs is to be told, too.
    from benchmarks.frontier.trial import Request, opened

    with opened(Request.decode(fields)) as trial:
        say({"ready": asdict(trial.prepare())})
        for line in sys.stdin:
            say({"timed": asdict(trial.time(int(line)))})


def _private_output() -> Say:
    """Standard output for our lines alone; everybody else's is sent to standard error."""
    file = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lambda message: print(json.dumps(message), file=file, flush=True)


def _status_of(error: BaseException) -> Status:
    import remat

    causes = list(_chain(error))
    if any(isinstance(item, remat.InfeasibleBudget) for item in causes):
        return Status.INFEASIBLE
    # torch.compile hands on what its compilers raise as text.
    if any("out of memory" in str(item).lower() for item in causes):
        return Status.OUT_OF_MEMORY
    return Status.FAILED


def _chain(error: BaseException) -> Any:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no words'}"[:300]


if __name__ == "__main__":
    main()
