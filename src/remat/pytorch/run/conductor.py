"""One graph's program and the session it belongs to: what runs for a call, and what the session is told of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from remat.pytorch.run.execute import Chosen, Saved
from remat.pytorch.run.lower import Lowered
from remat.pytorch.run.session import Session
from remat.pytorch.run.shapes.known import AnyGraph


@dataclass(frozen=True, slots=True)
class GraphConductor:
    """Connects one graph's program to its session."""

    session: Session
    graph: AnyGraph

    def before_forward(self, inputs: Sequence[Any]) -> Chosen:
        return self.session.or_give_up(lambda: self.session.choose(self.graph, inputs)) or self._unplanned()

    def _unplanned(self) -> Chosen:
        self.session.abandon_call()
        variant = self.graph.as_traced()
        return Chosen(variant.keep_all(), variant.absent)

    def after_forward(self, saved: Saved, outputs: Sequence[Any]) -> None:
        if not self.session.given_up:
            self.session.after_forward(saved, outputs)

    def before_backward(self, saved: Saved, tangents: Sequence[Any]) -> None:
        self.graph.saw(frozenset(number for number, tangent in enumerate(tangents) if tangent is None))
        if not self.session.given_up:
            self.session.before_backward(saved, tangents)

    def after_backward(self, saved: Saved) -> Callable[[Sequence[Any]], None] | None:
        note = self.session.after_backward(saved) if not self.session.given_up else None
        return note and (lambda gradients: self.session.or_give_up(lambda: note(gradients)))

    def holds_incoming(self) -> None:
        if not self.session.holds_incoming:
            self.session.holds_incoming = True
            if self.session.settings.plan is None:
                self.session.forget_plans()

    def keeps_gradients(self) -> None:
        self.graph.return_all()
        if self.session.settings.plan is None:
            self.session.forget_plans()
        warnings.warn(
            "A hook calls an optimizer and leaves the gradient that it was called for in memory: this step can exceed "
            "the budget; the next ones are planned for it.",
            stacklevel=2,
        )

    def surprised(self) -> tuple[Lowered, frozenset[int]]:
        variant = self.graph.variant()
        warnings.warn(
            "An output that mostly has no gradient received one: this backward ran its forward again, beyond the "
            "budget; the next step is planned for it.",
            stacklevel=2,
        )
        return variant.keep_all(), variant.absent
