"""`python -m tests.fuzz.shrink SEED …`: a failing case in, a smaller one out that fails in the same way, as Python.

One change at a time is tried, the boldest first: leave blocks out, undo an odd choice, make the batch smaller. What
still fails with the same verdict is kept, until nothing more can be changed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.fuzz.blocks import BLOCKS
from tests.fuzz.compare import Comparison, Settings, compare
from tests.fuzz.modules import Case, make_case
from tests.fuzz.parts import Sizes

MOST_TRIES = 60


def shrink(
    case: Case,
    fails: Callable[[Case], bool],
    tries: int = MOST_TRIES,
) -> Case:
    """The smallest case found for which `fails`; `case` itself has to."""
    done: set[Case] = {case}
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(case):
            if smaller in done or tries <= 0:
                continue
            done.add(smaller)
            tries -= 1
            if fails(smaller):
                case, progress = smaller, True
                break
    return case


def same_failure(found: Comparison, settings: Settings) -> Callable[[Case], bool]:
    """Whether another case ends as `found` did, at any budget: the same verdict and, in a crash, the same error."""
    first = found.details.partition(": ")[2][:40]

    def fails(case: Case) -> bool:
        again = compare(case, settings)
        if again.verdict is not found.verdict:
            return False
        return found.verdict.value != "crash" or again.details.partition(": ")[2][:40] == first

    return fails


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with a little less to them."""
    count = len(case.blocks)
    if count > 2:
        yield replace(case, blocks=case.blocks[: count // 2])
        yield replace(case, blocks=case.blocks[count // 2 :])
    if count > 1:
        for place in range(count):
            yield replace(case, blocks=case.blocks[:place] + case.blocks[place + 1 :])
    plain = {item.name: item.default for item in fields(Case)}
    for name in ("form", "backward", "returns", "entry", "micro_batches", "autocast", "drops_gradients", "update"):
        if getattr(case, name) != plain[name]:
            yield replace(case, **{name: plain[name]})
    for name in ("is_image", "head", "reduction", "loss_inside"):
        if getattr(case, name) != plain[name]:
            yield replace(case, **{name: plain[name]})
    for sizes in (Sizes(8, 5, 24), Sizes(2, 5, 24)):
        if sizes.batch <= case.sizes.batch and sizes != case.sizes:
            yield replace(case, sizes=sizes)


def reproduction(case: Case, budgets: tuple[str, ...] = ()) -> str:
    """Python that runs this case again, and the source of its blocks."""
    plain: dict[str, Any] = {item.name: item.default for item in fields(Case)}
    odd = {
        item.name: getattr(case, item.name)
        for item in fields(Case)
        if getattr(case, item.name) != plain[item.name] and item.name not in ("seed", "sizes", "blocks")
    }
    given = "".join(f", {name}={value if hasattr(value, 'name') else repr(value)}" for name, value in odd.items())
    sources = [inspect.getsource(BLOCKS[name].make) for name in dict.fromkeys(name for name, _ in case.blocks)]
    settings = f", Settings(budgets={budgets!r})" if budgets else ""
    return "\n".join(
        [
            "from tests.fuzz.compare import Settings, compare",
            "from tests.fuzz.modules import Backward, Case, Entry, Form, Returns, Update",
            "from tests.fuzz.parts import Sizes",
            "",
            f"case = Case({case.seed}, {case.sizes!r}, {case.blocks!r}{given})",
            f"print(compare(case{settings}).details)",
            "",
            "# " + case.describe(),
            *("# " + line for source in sources for line in source.rstrip().split("\n")),
        ]
    )


def main(seeds: list[str]) -> None:
    """Print what is left of each failing case."""
    from tests.fuzz.pool import Request, warm_up

    warm_up(Request())
    for case in map(make_case, map(int, seeds)):
        found = compare(case)
        print(f"# seed {case.seed}: {found.verdict.value} {found.details}", flush=True)
        if found.verdict.is_failure:
            small = shrink(case, same_failure(found, Settings()))
            print(f"# now: {compare(small).details}\n{reproduction(small)}\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
