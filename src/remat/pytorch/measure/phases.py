"""Which phase of the step it is: forward, backward or optimizer.

Backward is while the autograd engine runs, optimizer while an optimizer steps. What comes after either is the next
forward if it calls a module or needs a gradient; if not (clipping, scaling, zeroing), it belongs to the optimizer,
which is known only later: `settle` tells from which op on.
"""

from __future__ import annotations

from remat.core.results.profile import Phase


class Phases:
    """Told of everything that can change the phase; positions are those of ops."""

    def __init__(self) -> None:
        self.now = Phase.FORWARD
        self.is_computing = False
        """Whether this forward has called a module or needed a gradient; before that, data is loaded."""
        self.has_computed = False
        """Whether any forward has."""
        self._engine_depth = 0
        self._loose_from: int | None = None

    @property
    def in_engine(self) -> bool:
        return self._engine_depth > 0

    @property
    def is_loose(self) -> bool:
        """Whether it is still open if this is the next forward."""
        return self._loose_from is not None

    def computes(self) -> None:
        """A module was called, or an op left a node for backward."""
        if self.now is Phase.FORWARD:
            self.is_computing, self.has_computed, self._loose_from = True, True, None

    def engine_began(self) -> None:
        self._engine_depth += 1
        self.now = Phase.BACKWARD

    def engine_returned(self, position: int) -> None:
        self._engine_depth -= 1
        if not self.in_engine:
            self._begin_anew(position)

    def optimizer_began(self) -> None:
        self.now = Phase.OPTIMIZER

    def optimizer_returned(self, position: int) -> None:
        if self.in_engine:
            self.now = Phase.BACKWARD
        else:
            self._begin_anew(position)

    def settle(self) -> int | None:
        """The op from which on everything belongs to the optimizer; None where nothing does that did not."""
        found, self._loose_from = self._loose_from, None
        return found

    def _begin_anew(self, position: int) -> None:
        self.now, self.is_computing, self._loose_from = Phase.FORWARD, False, position
