"""Who is told when any optimizer steps.

Torch calls its global optimizer hooks while it iterates over them, so that none can come or go inside one. Two hooks
of ours therefore stay once they are there, and watchers come and go as they like.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class OptimizerWatcher(Protocol):
    def optimizer_began(self, optimizer: Optimizer) -> None: ...

    def optimizer_returned(self, optimizer: Optimizer) -> None: ...


_watchers: list[OptimizerWatcher] = []


def watch_optimizers(watcher: OptimizerWatcher) -> None:
    """The latest watcher is told first."""
    _install()
    _watchers.insert(0, watcher)


def unwatch_optimizers(watcher: OptimizerWatcher) -> None:
    _watchers.remove(watcher)


@cache
def _install() -> None:
    register_optimizer_step_pre_hook(_began)
    register_optimizer_step_post_hook(_returned)


def _began(optimizer: Optimizer, *_: Any) -> None:
    for watcher in list(_watchers):
        watcher.optimizer_began(optimizer)


def _returned(optimizer: Optimizer, *_: Any) -> None:
    for watcher in list(_watchers):
        watcher.optimizer_returned(optimizer)
