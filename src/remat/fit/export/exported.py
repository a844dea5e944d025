"""What an exporter makes of levers: the text of a file, and what that file has no place for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from remat.fit.levers import Levers


@dataclass(frozen=True, slots=True)
class ScriptTarget:
    """What is trained: a target as the command line takes it, and the sizes it is called with."""

    target: str = ""
    """A zoo name or `package.module:factory`; empty where only the user knows."""
    sizes: Mapping[str, float | str] = field(default_factory=dict)
    file: str = "train.py"
    """What a script is told to be called."""

    @property
    def is_factory(self) -> bool:
        return not self.target or ":" in self.target


@dataclass(frozen=True, slots=True)
class Exported:
    text: str
    notes: tuple[str, ...] = ()
    """What the file cannot say and the training code has to, a sentence for each."""


def plan_note(levers: Levers, where: str) -> tuple[str, ...]:
    """The plan, which is code and no setting; `where` says who gets the model that it makes."""
    if levers.budget_bytes is None:
        return ()
    offload = ', offload="cpu"' if levers.offloads_activations else ""
    return (f"The plan is not a setting: give {where} `remat.optimize(model, {levers.budget_bytes}{offload})`.",)


def offloaded(levers: Levers) -> str:
    """The call that puts an optimizer's state on the host."""
    masters = ", master_weights=True" if levers.has_masters else ""
    during = ", in_backward=True" if levers.steps_in_backward else ""
    return f"remat.offload_optimizer(optimizer{masters}{during})"
