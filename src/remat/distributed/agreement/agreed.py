"""How a session of one rank agrees with the others: on what is trained, on costs, on budgets and on the plan.

The first graph of a step is a meeting: whoever is about to train something else is named on every rank, before
anything has run. From then on one rank measures and solves and the others take what it found: the first of those that
are alike for what was met on, whoever comes first for what only some may ask for, as a shape that one rank sees first.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from remat.core.files.plan_file import plan_from_text, plan_text
from remat.core.problem import Costs
from remat.core.results.plan import Plan
from remat.distributed.agreement.facts import Facts, as_said, judge, nothing_to_plan
from remat.distributed.agreement.ranks import Interruption, Ranks, error_of
from remat.distributed.agreement.vigil import Vigil
from remat.errors import InfeasibleBudget, RankLost, RanksDiffer

Found = TypeVar("Found")


class Agreement(Protocol):
    """What a session asks for. `key` tells for what: ranks that ask the same are given the same."""

    @property
    def ranks(self) -> int:
        """How many train together."""

    def meet(self, say: Callable[[], tuple[Facts, int]], *, is_bound: bool = False) -> None:
        """Before the first graph runs: facts of this rank and the bytes it holds. Raises where ranks differ.

        Where graphs meet other ranks in collectives of their own, all are bound to run the same.
        """

    def attending(self) -> AbstractContextManager[None]:
        """A stretch of planning, or a call that may plan: where a rank ends meanwhile, `RankLost` is raised at once."""

    def leave(self, error: BaseException | None = None) -> None:
        """The first call is over, with no graph to meet on, or by an error."""

    def unanimous(self, find: Callable[[], Found]) -> Found:
        """What this rank finds for its first graph, unless a budget is refused on any: then it is on all."""

    def more_bytes(self) -> int:
        """What another rank holds beyond this one."""

    def costs(self, key: object, find: Callable[[], Costs]) -> Costs: ...

    def number(self, key: object, find: Callable[[], int]) -> int: ...

    def plan(self, key: object, find: Callable[[], Plan]) -> Plan: ...


@dataclass(frozen=True, slots=True)
class Alone:
    """The agreement of one, with ranks that are only pretended, if any."""

    ranks: int = 1

    def meet(self, say: Callable[[], tuple[Facts, int]], *, is_bound: bool = False) -> None:
        """Nobody else is there."""

    def attending(self) -> AbstractContextManager[None]:
        return nullcontext()

    def leave(self, error: BaseException | None = None) -> None:
        """Nobody waits."""

    def unanimous(self, find: Callable[[], Found]) -> Found:
        return find()

    def more_bytes(self) -> int:
        return 0

    def costs(self, key: object, find: Callable[[], Costs]) -> Costs:
        return find()

    def number(self, key: object, find: Callable[[], int]) -> int:
        return find()

    def plan(self, key: object, find: Callable[[], Plan]) -> Plan:
        return find()


@dataclass(slots=True)
class Together:
    """The agreement of several, as one of them takes part in it."""

    peers: Ranks
    _is_bound: bool = False
    _has_met: bool = False
    _has_agreed: bool = False
    """Whether the first plans were made."""
    _is_uniform: bool = True
    """Whether all ranks are alike, shapes included."""
    _held_bytes: int = 0
    _most_bytes: int = 0
    _leader: int = 0
    _began_s: float | None = None
    """When this rank first got ready to plan."""
    _attends: bool = False
    _asked: Counter[str] = field(default_factory=Counter)
    """How often this rank has asked for each key: what is asked for again has changed."""

    @property
    def ranks(self) -> int:
        return len(self.peers.members)

    def meet(self, say: Callable[[], tuple[Facts, int]], *, is_bound: bool = False) -> None:
        if self._has_met:
            return
        self._has_met, self._is_bound = True, is_bound
        facts, self._held_bytes = say()
        verdict = self._judged(as_said(facts, self._held_bytes))
        self._most_bytes, self._leader = int(verdict["most_bytes"]), int(verdict["like"][self.peers.place])
        self._is_uniform = not any(verdict["like"])
        if verdict["warned"]:
            warnings.warn(f"{verdict['warned']}; each is planned for its own shapes.", stacklevel=2)

    @contextmanager
    def attending(self) -> Iterator[None]:
        if self._attends:
            yield
            return
        self._began_s = self._began_s or time.monotonic()
        self._attends = True
        try:
            with Vigil(self.peers):
                yield
        finally:
            self._attends = False

    def leave(self, error: BaseException | None = None) -> None:
        if self._has_met or isinstance(error, Interruption):
            return
        self._has_met = True
        if error is None:
            self._judged(nothing_to_plan("no graph"))
            return
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        self.peers.give_up(
            nothing_to_plan(reason), f"Rank {self.peers.own} failed before this step could be planned ({reason})"
        )

    def unanimous(self, find: Callable[[], Found]) -> Found:
        if self._has_agreed or not self._has_met:
            return find()
        self._has_agreed = True
        if self._is_uniform:
            # What one is refused all are: it is found once.
            return find()
        refused: InfeasibleBudget | None = None
        try:
            found = find()
        except InfeasibleBudget as error:
            refused = error
        said = {} if refused is None else {"refused": str(refused), "min_budget": refused.min_budget}
        verdict = self.peers.meet(said, _first_refusal)
        _check_presence(verdict)
        if verdict["refused"]:
            raise error_of(verdict)
        return found

    def _judged(self, said: dict[str, Any]) -> dict[str, Any]:
        verdict: dict[str, Any] = self.peers.meet(
            said, lambda heard: judge(heard, self.peers.members, same_shapes=self._is_bound), since=self._began_s
        )
        _check_presence(verdict)
        if verdict["refused"]:
            raise RanksDiffer(f"{verdict['refused']}; give every rank the same.")
        return verdict

    def more_bytes(self) -> int:
        return max(0, self._most_bytes - self._held_bytes)

    def costs(self, key: object, find: Callable[[], Costs]) -> Costs:
        found = self._share("costs", key, lambda: asdict(find()))
        times, spaces, sizes = (tuple(found[name]) for name in ("time_ns", "workspace_bytes", "size_bytes"))
        return Costs(times, spaces, sizes)

    def number(self, key: object, find: Callable[[], int]) -> int:
        return int(self._share("number", key, find))

    def plan(self, key: object, find: Callable[[], Plan]) -> Plan:
        return plan_from_text(self._share("plan", key, lambda: plan_text(find())))

    def _share(self, kind: str, key: object, find: Callable[[], Any]) -> Any:
        text = hashlib.sha256(json.dumps([kind, key], default=str).encode()).hexdigest()[:32]
        self._asked[text] += 1
        with self.attending():
            return self.peers.share(f"{text}/{self._asked[text]}", find, leader=self._leader, waits=self._is_bound)


def _first_refusal(said: list[dict[str, Any] | None]) -> dict[str, Any]:
    return next((item for item in said if item), {"refused": ""})


def _check_presence(verdict: dict[str, Any]) -> None:
    if verdict.get("lost"):
        raise RankLost(f"{verdict['refused']}; see why, and start all ranks again.")
