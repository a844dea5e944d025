"""Forwards that later ones overtook: somebody keeps their results, and with them what they saved."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from remat.pytorch.run.execute import Saved
from remat.pytorch.run.variants import Ran

MOST_HELD = 4
"""How often steps are planned anew for forwards whose results somebody keeps: a loop may do so in every step."""


@dataclass(slots=True)
class HeldForwards:
    _saved: list[weakref.ref[Saved]] = field(default_factory=list)
    _times: int = 0

    def set_aside(self, calls: Sequence[Ran], *, may_plan: bool) -> bool:
        """A step begins after these calls; whether plans are out of date by what some of them left."""
        overtaken = [call.saved for call in calls if call.saved is not None and call.is_open]
        # What they saved was not there when steps were planned.
        is_news = bool(overtaken) and self._times < MOST_HELD and may_plan
        self._times += is_news
        self._saved = [saved for saved in (*self._saved, *overtaken) if saved() is not None]
        return is_news

    def tensors(self) -> list[tuple[Any, ...]]:
        """What they saved."""
        return [saved.tensors for reference in self._saved if (saved := reference()) is not None]
