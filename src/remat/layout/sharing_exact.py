"""The smallest sharing by tags: a search over all of them, with a proof at its end.

In: storages. Out: a `Sharing` of the least total, and a bound that equals it where the search came to its end. Buffers
are taken from the largest on, so that a tag is as large as the first buffer that it gets: each buffer goes to a tag
with which it agrees, for nothing, or opens one. Two buffers agree where they are never alive together, or where one may
be written into the other; a set of buffers can have one tag when every two of them agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from remat.layout.sharing import Sharing, load_in_place
from remat.layout.storages import Storages

NODE_LIMIT = 2_000_000
"""Ways tried before the search gives up its proof: some twenty buffers take a few thousand."""


def share_exactly(storages: Storages, *, node_limit: int = NODE_LIMIT) -> Sharing:
    """The sharing of the least total bytes."""
    buffers = storages.buffers
    order = sorted(range(len(buffers)), key=lambda number: (-buffers[number].size, buffers[number].lower))
    search = _Search(
        sizes=[buffers[number].size for number in order],
        agrees=_agreements(storages, order),
        floor=load_in_place(storages),
        node_limit=node_limit,
    )
    search.run()
    tags = [0] * len(buffers)
    for number, tag in zip(order, search.best_tags, strict=True):
        tags[number] = tag
    return Sharing(storages, tuple(tags), search.best if search.is_complete else search.floor)


def _agreements(storages: Storages, order: list[int]) -> list[int]:
    """For each buffer in `order`, those that may have its tag, as bits."""
    buffers, pairs = storages.buffers, set(storages.in_place)
    return [
        sum(
            1 << place
            for place, other in enumerate(order)
            if not buffers[number].meets(buffers[other]) or (number, other) in pairs or (other, number) in pairs
        )
        for number in order
    ]


_Node = tuple[tuple[int, ...], tuple[int, ...], int]
"""The tags of the first buffers, the buffers of each tag as bits, and what the tags add up to."""


@dataclass(slots=True)
class _Search:
    sizes: list[int]
    agrees: list[int]
    floor: int
    node_limit: int
    best: int = field(init=False)
    best_tags: tuple[int, ...] = field(init=False)
    _nodes: int = 0

    def __post_init__(self) -> None:
        self.best, self.best_tags = sum(self.sizes), tuple(range(len(self.sizes)))

    @property
    def is_complete(self) -> bool:
        return self.best == self.floor or self._nodes < self.node_limit

    def run(self) -> None:
        """Depth first: tags that are there before new ones, because they cost nothing."""
        waiting: list[_Node] = [((), (), 0)]
        while waiting and self.best > self.floor and self._nodes < self.node_limit:
            tags, members, total = waiting.pop()
            if total >= self.best:
                continue
            self._nodes += 1
            if len(tags) == len(self.sizes):
                self.best, self.best_tags = total, tags
            else:
                waiting += reversed(self._children(tags, members, total))

    def _children(self, tags: tuple[int, ...], members: tuple[int, ...], total: int) -> list[_Node]:
        number = len(tags)
        mine = 1 << number
        children: list[_Node] = []
        for tag, inside in enumerate(members):
            if inside & ~self.agrees[number] == 0:
                children.append(((*tags, tag), (*members[:tag], inside | mine, *members[tag + 1 :]), total))
        return [*children, ((*tags, len(members)), (*members, mine), total + self.sizes[number])]
