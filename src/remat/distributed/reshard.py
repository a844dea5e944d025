"""FSDP2's `reshard_after_forward`, block by block, as part of the plan.

In: an optimized model that `fully_shard` has spread over ranks, and a step of it. Out: which blocks keep their gathered
parameters from forward to backward, set by FSDP's own call, and the plan that goes with it. What a block keeps is not
there for activations, and what it frees is gathered again: both are priced, one by the plan, the other by the link.
The last blocks keep theirs for the shortest time, so it is from the end that blocks are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import distributed

from remat.core.budget import Budget, BudgetUnit
from remat.core.results.plan import Plan
from remat.errors import RematError
from remat.pytorch._compat.distributed import group_bytes, sharded_modules
from remat.pytorch.costs.collective_costs import RankLink, link_of
from remat.pytorch.run.optimize import eager_session_of, plan_of, set_budget

MOST_STEPS = 6
"""Until a step is planned."""


@dataclass(frozen=True, slots=True)
class ReshardTry:
    kept: int
    """How many blocks, from the last, keep their parameters."""
    fits: bool
    time_ns: float
    """Of the plan, with what is gathered again."""
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class ReshardChoice:
    kept: int
    plan: Plan
    tried: tuple[ReshardTry, ...]


def choose_reshard(model: Any, step: Callable[[], Any], *, link: RankLink | None = None) -> ReshardChoice:
    """Choose which blocks free their parameters after forward; every rank calls this with the same.

    `step` runs one step of `model`, forward and backward, and clears gradients. It is called a few times for each of
    the choices that are looked at: none, half and all of the blocks, and those between the best of them.
    """
    blocks = sharded_modules(model)[1:]
    if not blocks:
        raise RematError("No block of this model is sharded by FSDP2, so there is nothing to keep; call fully_shard.")
    search = _Search(model, step, blocks, link or link_of(next(model.parameters()).device))
    for kept in dict.fromkeys((0, len(blocks), len(blocks) // 2)):
        search.look(kept)
    for _ in range(len(blocks).bit_length()):
        chosen = search.best().kept
        known = sorted(item.kept for item in search.tried)
        place = known.index(chosen)
        around = [(chosen + other) // 2 for other in known[max(0, place - 1) : place + 2]]
        missing = [kept for kept in dict.fromkeys(around) if kept not in known]
        if not missing:
            break
        for kept in missing:
            search.look(kept)
    best = search.best()
    return ReshardChoice(best.kept, search.planned(best.kept), tuple(sorted(search.tried, key=lambda item: item.kept)))


class _Search:
    def __init__(self, model: Any, step: Callable[[], Any], blocks: list[Any], link: RankLink) -> None:
        self._model, self._step, self._blocks, self._link = model, step, blocks, link
        self._bytes = [sum(group_bytes(block)) for block in blocks]
        self._budget: Budget | None = None
        self.tried: list[ReshardTry] = []

    def look(self, kept: int) -> None:
        plan = self.planned(kept)
        ranks = distributed.get_world_size()
        again = sum(self._link.gather_s(size, ranks) for size in self._bytes[: len(self._blocks) - kept])
        fits = plan.predicted_peak <= plan.budget_bytes
        self.tried.append(ReshardTry(kept, fits, plan.predicted_time + 1e9 * again, plan.predicted_peak))

    def best(self) -> ReshardTry:
        """The fastest that fits, or the leanest where none does."""
        return min(self.tried, key=lambda item: (not item.fits, item.time_ns if item.fits else item.peak_bytes))

    def planned(self, kept: int) -> Plan:
        """The plan where so many blocks keep theirs, under the bytes of the first one that was made."""
        for place, block in enumerate(self._blocks):
            block.set_reshard_after_forward(place < len(self._blocks) - kept, recurse=False)
        session = eager_session_of(self._model)
        session.seen.clear()
        session.dropped.clear()
        if self._budget is not None:
            set_budget(self._model, self._budget)
        for _ in range(MOST_STEPS):
            self._step()
            if session.plan is not None and self._budget is not None:
                break
        plan = plan_of(self._model)
        if self._budget is None:
            self._budget = Budget(plan.budget_bytes, BudgetUnit.BYTES)
        return plan
