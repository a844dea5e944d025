"""What a schedule of a pipeline has each rank compute, and how many micro-batches wait in a stage meanwhile.

In: torch's schedule. Out: `Action`s in the order in which each rank runs them, and counts of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from remat.errors import RematError


class StageWork(Enum):
    FORWARD = "F"
    BACKWARD = "B"
    INPUTS_BACKWARD = "I"
    """Of a backward in two parts, the gradients that the stage before waits for."""
    WEIGHTS_BACKWARD = "W"
    """The rest of it."""


@dataclass(frozen=True, slots=True)
class Action:
    work: StageWork
    stage: int
    micro: int

    @property
    def ends(self) -> bool:
        """Whether what the micro-batch has saved is gone after it."""
        return self.work in (StageWork.BACKWARD, StageWork.WEIGHTS_BACKWARD)

    def __str__(self) -> str:
        return f"{self.stage}{self.work.value}{self.micro}"


Orders = Mapping[int, tuple[Action, ...]]
"""For each rank of a pipeline, what it computes."""


def orders_of(noted: Mapping[int, Sequence[tuple[str, int, int]]]) -> Orders:
    """Each rank's actions, from (kind, stage, micro-batch)."""
    orders = {rank: tuple(Action(StageWork(kind), *place) for kind, *place in row) for rank, row in noted.items()}
    for rank, row in orders.items():
        forwards = Counter((item.stage, item.micro) for item in row if item.work is StageWork.FORWARD)
        backwards = Counter((item.stage, item.micro) for item in row if item.ends)
        if forwards != backwards or any(count > 1 for count in forwards.values()):
            raise RematError(
                f"The schedule has rank {rank} run {sum(forwards.values())} forwards and {sum(backwards.values())} "
                "backwards, not one of each for every micro-batch; give a schedule that trains."
            )
    return orders


def is_split(orders: Orders) -> bool:
    """Whether backward runs in two parts anywhere."""
    return any(action.work is StageWork.INPUTS_BACKWARD for order in orders.values() for action in order)


def at_once(orders: Orders) -> Orders:
    """The same with every backward whole, where its first part was."""
    whole = StageWork.BACKWARD
    return {
        rank: tuple(
            replace(action, work=whole) if action.work is StageWork.INPUTS_BACKWARD else action
            for action in order
            if action.work is not StageWork.WEIGHTS_BACKWARD
        )
        for rank, order in orders.items()
    }


def in_flight(order: Sequence[Action]) -> dict[int, int]:
    """For each stage, the most micro-batches that have gone forward in it and not yet all the way back."""
    waiting: Counter[int] = Counter()
    most: dict[int, int] = {}
    for action in order:
        if action.work is StageWork.FORWARD:
            waiting[action.stage] += 1
            most[action.stage] = max(most.get(action.stage, 0), waiting[action.stage])
        elif action.ends:
            waiting[action.stage] -= 1
    return most
