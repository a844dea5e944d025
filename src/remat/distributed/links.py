"""What a step sends to other ranks, and the ways to train on several of them: `Traffic` in, seconds out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remat.errors import RematError

if TYPE_CHECKING:
    from remat.pytorch.costs.collective_costs import RankLink

ENGINES = ("ddp", "zero1", "fsdp", "fsdp:keep")
"""Who trains on several ranks; `fsdp` frees gathered parameters after forward, `fsdp:keep` keeps them for backward."""


PIPELINE = "pp"
"""`pp:4` is four stages, `pp:4:8` with eight micro-batches."""


@dataclass(frozen=True, slots=True)
class PipelineShape:
    stages: int
    micro_batches: int


def parse_pipeline(text: str) -> PipelineShape | None:
    """Stages and micro-batches, twice as many unless they are given; None for another way to train."""
    name, *numbers = text.split(":")
    if name != PIPELINE:
        return None
    if not 1 <= len(numbers) <= 2 or not all(item.isdigit() and int(item) for item in numbers):
        raise RematError(f"{text!r} is no pipeline; write pp:4 for four stages, pp:4:8 for eight micro-batches too.")
    stages = int(numbers[0])
    return PipelineShape(stages, int(numbers[1]) if len(numbers) == 2 else 2 * stages)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The collectives of one step, by the bytes that each rank has before or after them in one piece."""

    gathered_bytes: tuple[int, ...] = ()
    scattered_bytes: tuple[int, ...] = ()
    reduced_bytes: tuple[int, ...] = ()
    sent_bytes: tuple[int, ...] = ()
    """To or from one other rank."""

    @property
    def calls(self) -> int:
        return sum(map(len, (self.gathered_bytes, self.scattered_bytes, self.reduced_bytes, self.sent_bytes)))

    def seconds(self, link: RankLink, ranks: int) -> float:
        """One after the other, without what computation hides."""
        halves: Iterable[int] = (*self.gathered_bytes, *self.scattered_bytes)
        reduced = sum(link.reduce_s(size, ranks) for size in self.reduced_bytes)
        return reduced + sum(link.gather_s(size, ranks) for size in halves) + sum(map(link.send_s, self.sent_bytes))
