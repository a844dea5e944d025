"""Updates that begin while backward runs: copies of state hide behind it, and gradients are not there all at once.

In: gradients, as autograd has finished them. Out: buckets of parameters, handed to `StateAway` when they are full; what
is left at the end is the optimizer's step. A bucket is updated when the next one is full, which gives its state the
time to come.
"""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict

import torch
from torch.optim import Optimizer

from remat.pytorch.host.state_away import StateAway


class InBackward:
    """Told of every gradient of one optimizer's parameters."""

    def __init__(self, optimizer: Optimizer, away: StateAway) -> None:
        self._optimizer, self._away = optimizer, away
        self._places: dict[torch.Tensor, int] = {}
        """Of parameters that are watched: their group."""
        self._open: dict[int, list[torch.Tensor]] = defaultdict(list)
        """By group, parameters whose gradients are there, and too few for a bucket."""
        self._updated: set[torch.Tensor] = set()
        """Since the last step."""
        self._told = False
        self.watch()

    def watch(self) -> None:
        """Parameters may have joined."""
        own = weakref.ref(self)

        def ready(parameter: torch.Tensor) -> None:
            found = own()
            if found is not None:
                found.ready(parameter)

        for place, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in self._places and parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(ready)
                    self._places[parameter] = place

    @torch.no_grad()
    def ready(self, parameter: torch.Tensor) -> None:
        """The gradient is there."""
        place = self._places[parameter]
        waiting = self._open[place]
        if self._away.is_waiting(parameter) or any(parameter is item for item in waiting):
            # Of a second backward, and still in time: autograd has added to it.
            return
        self._note(parameter)
        waiting.append(parameter)
        if self._away.is_full(waiting):
            self._away.push_early(place, self._open.pop(place))

    def step(self) -> None:
        """The optimizer steps: what is left is not early any more."""
        for place, parameters in list(self._open.items()):
            self._away.push_early(place, parameters)
        self._open.clear()
        self._updated.clear()
        self.watch()

    def _note(self, parameter: torch.Tensor) -> None:
        if parameter in self._updated and not self._told:
            self._told = True
            warnings.warn(
                "A second backward came before optimizer.step(): with in_backward=True each is an update of its own; "
                "leave in_backward out where gradients are to be added up.",
                stacklevel=3,
            )
        self._updated.add(parameter)
