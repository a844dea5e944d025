"""What to keep where a kept byte has a price: one minimum cut, however long the graph is.

Fix the cut j of `cuts`, the op at which memory is tightest, and put its one memory row into the objective at a price λ
for each byte. With x_i for "op i runs again after j", and y_v for "an op after j, or one that runs again, reads v":

    L(λ) = min Σ time_i · x_i + λ · Σ bytes_v · max(0, y_v - x_p(v)) - λ · room
    y_v ≥ x_i for every reader i of v;   y_v = 1 where an op after j reads v, or v is an output

A value that is read and not computed again has been kept. For any λ ≥ 0 this is a lower bound on the recomputation of
every schedule within the budget: such a schedule gives an x whose kept bytes fit into `room`, so that it pays the
times alone and gets at most nothing for its bytes. Every term is a time, a price, or an implication, so the minimum is
that of a cut between "1" and "0" in a network with two nodes an op. Capacities are rounded down, which only lowers the
minimum. L is concave in λ, and its maximum is the bound of the relaxed cut program: nothing is lost by pricing.

Blocks that repeat would all change sides at one price. Ops that run early count as a little cheaper to run again than
they are, which lowers the bound by as little, and the choice then moves from block to block as the price does: early
ones are given up first, whose recomputation comes last in backward, when what later ones kept is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remat.errors import MissingExtra
from remat.solvers.schedule.editable import FlatProblem

EARLY_DISCOUNT = 3e-3
"""By which share the first op counts as cheaper to run again than it is."""
RESOLUTION = 2**30
"""The time of all ops in the units of the network: flows are 32-bit integers."""
NEVER = float(2**31 - 1)
"""The capacity of what no cut goes through."""
NEAR_SHARE = 2e-3
"""Of the room, that may stay empty when the best price is looked for."""
MOST_PRICES = 40

Numbers = NDArray[np.int32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PricedChoice:
    """The best at one price."""

    price: float
    bound_ns: float
    """L of the module's docstring: recomputation that no schedule within the budget avoids."""
    held: Flags
    """For each value of the network, whether it is kept."""
    kept_bytes: int
    extra_ns: float
    """What the rest takes to run again, early ops at a discount."""


class PricedCut:
    """The network of one cut: built once, asked at many prices."""

    def __init__(self, flat: FlatProblem, cut: int, given: Collection[int] = ()) -> None:
        """Values in `given` are kept whatever their price, as what the op at the cut reads is."""
        self.flat, self.cut = flat, cut
        self._given = {value for value in (*given, *flat.inputs[cut]) if flat.producer[value] < cut}
        read = {value for number in range(cut + 1, flat.count) for value in flat.inputs[number]}
        self.read_later = {value for value in read | flat.final if flat.producer[value] < cut}
        """What ops after the cut read, and outputs."""
        self._given |= {value for value in self.read_later if not flat.recomputable[flat.producer[value]]}
        self.given_bytes = sum(flat.size[value] for value in self._given)
        total = sum(flat.time)
        self._scale = RESOLUTION / total if total > 0 else 1.0
        self._build()
        self._index()

    def _build(self) -> None:
        """Node 0 is "1" and node 1 is "0"; then there is one for each y and each x."""
        flat, given = self.flat, self._given
        self._y: dict[int, int] = {}
        self._x: dict[int, int] = {}
        arcs = [(0, self._node(self._y, value), NEVER, 0.0) for value in sorted(self.read_later - given)]
        """From, to, capacity, and capacity for each unit of price."""
        pending = list(self._y)
        while pending:
            value = pending.pop()
            number = flat.producer[value]
            if number not in self._x:
                arcs.append((self._node(self._x, number), 1, self._time(number), 0.0))
                sources = [source for source in flat.inputs[number] if source not in given]
                pending += [source for source in sources if source not in self._y]
                arcs += [(self._x[number], self._node(self._y, source), NEVER, 0.0) for source in sources]
            arcs.append((self._y[value], self._x[number], 0.0, float(flat.size[value])))
        self._tails = np.array([arc[0] for arc in arcs], dtype=np.int32)
        self._heads = np.array([arc[1] for arc in arcs], dtype=np.int32)
        self._fixed = np.array([arc[2] for arc in arcs])
        self._priced = np.array([arc[3] for arc in arcs])

    def _node(self, nodes: dict[int, int], item: int) -> int:
        """The node of an op or a value, a new one where it has none."""
        return nodes.setdefault(item, 2 + len(self._x) + len(self._y))

    def _index(self) -> None:
        """What is summed up over one side of a cut."""
        flat = self.flat
        self._values = list(self._y)
        self._op_nodes = np.array(list(self._x.values()), dtype=np.int64)
        self._times = np.array([self._time(number) for number in self._x])
        self._value_nodes = np.array(list(self._y.values()), dtype=np.int64)
        self._maker_nodes = np.array([self._x[flat.producer[value]] for value in self._values], dtype=np.int64)
        self._sizes = np.array([flat.size[value] for value in self._values], dtype=np.int64)
        pinned = sum(flat.size[value] for value in self._values if not flat.recomputable[flat.producer[value]])
        self._highest_price = RESOLUTION / 2 / self._scale / max(pinned, 1)

    def _time(self, number: int) -> float:
        if not self.flat.recomputable[number]:
            return NEVER
        discount = EARLY_DISCOUNT * (1 - number / max(self.cut, 1))
        return self.flat.time[number] * self._scale * (1 - discount)

    def at(self, price: float, room: int) -> PricedChoice:
        """The best choice where each byte kept at the cut costs `price` ns, and `room` bytes are free there."""
        # What has to be kept must not flow over: any lower price is as valid.
        price = min(price, self._highest_price)
        capacity = np.floor(np.minimum(self._fixed + self._priced * (price * self._scale), NEVER))
        flow, is_one = _minimum_cut(
            self._tails, self._heads, capacity.astype(np.int32), 2 + len(self._x) + len(self._y)
        )
        held = is_one[self._value_nodes] & ~is_one[self._maker_nodes]
        kept_bytes = int(self._sizes[held].sum()) + self.given_bytes
        bound = flow / self._scale + price * (self.given_bytes - room)
        extra = float(self._times[is_one[self._op_nodes]].sum()) / self._scale
        return PricedChoice(price, bound, held, kept_bytes, extra)

    def kept(self, choice: PricedChoice) -> frozenset[int]:
        """Values of ops before the cut that are in memory there."""
        return frozenset(self._values[place] for place in np.flatnonzero(choice.held)).union(self._given)

    def best(self, room: int, stop: Callable[[], bool] = lambda: False) -> tuple[float, PricedChoice]:
        """The best bound of any price, and the choice that fills `room` best; the leanest one where none fits."""
        low = self.at(0.0, room)
        if low.kept_bytes <= room:
            return low.bound_ns, low
        bound, high = low.bound_ns, self.at(self._steep(), room)
        bound = max(bound, high.bound_ns)
        for _ in range(MOST_PRICES):
            freed = low.kept_bytes - high.kept_bytes
            if high.kept_bytes > room or room - high.kept_bytes <= NEAR_SHARE * room or freed <= 0 or stop():
                break
            # Where the lines of both choices meet L can be no higher than there.
            price = (high.extra_ns - low.extra_ns) / freed
            if not low.price < price < high.price:
                break
            middle = self.at(price, room)
            bound = max(bound, middle.bound_ns)
            if middle.kept_bytes in (low.kept_bytes, high.kept_bytes):
                break
            low, high = (low, middle) if middle.kept_bytes <= room else (middle, high)
        return bound, high

    def _steep(self) -> float:
        """A price at which nothing is kept that can be computed again."""
        return 2.0 * sum(self.flat.time)


def is_available() -> bool:
    try:
        _csgraph()
    except MissingExtra:
        return False
    return True


def _minimum_cut(tails: Numbers, heads: Numbers, capacity: Numbers, nodes: int) -> tuple[int, Flags]:
    """The flow from node 0 to node 1, and for each node whether it is on the side of node 0."""
    csgraph, sparse = _csgraph()
    network = sparse.csr_array((capacity, (tails, heads)), shape=(nodes, nodes))
    found = csgraph.maximum_flow(network, 0, 1)
    left = network.astype(np.int64) - found.flow
    left.eliminate_zeros()
    is_one = np.zeros(nodes, dtype=np.bool_)
    is_one[csgraph.breadth_first_order(left, 0, return_predecessors=False)] = True
    return int(found.flow_value), is_one


def _csgraph() -> tuple[Any, Any]:
    try:
        from scipy import sparse
        from scipy.sparse import csgraph
    except ImportError as error:
        raise MissingExtra("Minimum cuts need scipy; install `remat[solvers]`.") from error
    return csgraph, sparse
