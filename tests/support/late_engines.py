"""Copy engines that are as late as they are allowed to be, for stores that never wait.

A copy is queued and runs when something waits for it, or now and then by chance before that; each direction in order.
What a store must wait for and does not shows as wrong bits.
"""

from __future__ import annotations

import random
import threading
from collections import deque

import torch

from remat.pytorch.host.engines import Moment


class LateEngines:
    def __init__(self, seed: int) -> None:
        self.device = torch.device("cpu")
        self._chance = random.Random(seed)
        self._queues: dict[str, deque[tuple[int, torch.Tensor, torch.Tensor, tuple[Moment, ...]]]]
        self._queues = {"out": deque(), "back": deque()}
        self._order = 0
        self._turn = threading.RLock()

    def send(self, source: torch.Tensor, target: torch.Tensor) -> Moment:
        return self._add("out", source, target)

    def now(self) -> None:
        """Only copies are late."""

    def fetch(self, source: torch.Tensor, target: torch.Tensor, *after: Moment) -> Moment:
        return self._add("back", source, target, *after)

    def wait(self, moment: Moment) -> None:
        if moment is not None:
            with self._turn:
                self._run_until(moment)

    finish = wait

    def _add(self, name: str, source: torch.Tensor, target: torch.Tensor, *after: Moment) -> Moment:
        with self._turn:
            self._order += 1
            self._queues[name].append((self._order, source, target, after))
            moment = name, self._order
            for queue in self._chance.sample(sorted(self._queues), k=2):
                if self._chance.random() < 0.5 and self._queues[queue]:
                    self._run_until((queue, self._queues[queue][0][0]))
            return moment

    def _run_until(self, until: tuple[str, int]) -> None:
        name, order = until
        queue = self._queues[name]
        while queue and queue[0][0] <= order:
            _, source, target, after = queue[0]
            for moment in after:
                self.wait(moment)
            target.copy_(source)
            queue.popleft()
