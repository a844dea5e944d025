"""What runner, backend, kernels and session expect of each other.

The runner calls a step and tells its session when; the backend takes each graph that Dynamo finds, with its place in
the step, and hands it to the kernels that are to run it; these put it into the session, which plans. A session of eager
kernels and one of compiled code differ in everything but what is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch.fx import GraphModule

from remat.core.budget import Budget
from remat.core.results.plan import Plan
from remat.distributed.agreement.agreed import Agreement
from remat.pytorch._compat.dynamo import GraphEnd
from remat.pytorch._compat.symbols import Sizes, Symbols
from remat.pytorch.costs.plain_peak import PlainStep
from remat.pytorch.resident.memory import ResidentMemory
from remat.pytorch.run.settings import Settings

Compiled = Callable[..., Any]
"""What Dynamo calls in place of a graph."""


class StepSession(Protocol):
    """One optimized step: what was captured of it, the plan in use, and what it is told of each call.

    `begin_call` comes before everything else of a call, and either `end_call` or, where the step raised,
    `abandon_call` after it; graphs are added in between.
    """

    settings: Settings
    owner: ResidentMemory
    agreement: Agreement
    """With the ranks that train together."""
    left_out: int
    """Graphs that were captured and run unplanned, each with a warning of its own."""
    broken: bool
    """Whether Dynamo has met something in this call that it cannot trace."""
    fixed_because: str
    """Why sizes that change cannot be left open; empty where they can."""

    @property
    def graphs(self) -> Sequence[object]:
        """What was captured and may be planned."""

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None until there is one."""

    def begin_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """The step is called."""

    def end_call(self) -> None:
        """The step has returned."""

    def abandon_call(self) -> None:
        """The step has raised: what it did says nothing of the next one."""

    def is_under_way(self) -> bool:
        """Whether something of the last call is still to come, so that no other thread may begin one."""

    def set_budget(self, budget: Budget) -> None:
        """Plan anew at the next call."""

    def note_break(self, end: GraphEnd) -> None:
        """Dynamo ended a graph where the step does not end."""

    def note_skipped(self, reasons: Iterable[str]) -> None:
        """Dynamo left out whole functions."""


@dataclass(frozen=True, slots=True)
class FoundGraph:
    """A graph that Dynamo found, with its place in the step."""

    module: GraphModule
    inputs: Sequence[Any]
    alone: bool
    """Whether it is the whole forward."""
    breaks_off: bool
    """Whether it ends at something that Dynamo cannot trace."""
    plain_step: Callable[[], PlainStep]
    """What plain eager needs for it; takes as long as tracing."""
    plain_at: Callable[[Symbols, Sizes], PlainStep]
    """The same at other sizes, of a graph that leaves some open."""


class Kernels(Protocol):
    """Who runs the graphs of one session: eager kernels, or the code of a compiler."""

    @property
    def session(self) -> StepSession:
        """Where graphs are planned."""

    def tracing(self) -> AbstractContextManager[None]:
        """What Dynamo is to do otherwise while it traces for these kernels."""

    def compile(self, found: FoundGraph) -> Compiled:
        """Put a graph that needs gradients into the session; what comes back runs it under the session's plan."""

    def leave(self, module: GraphModule, inputs: Sequence[Any]) -> Compiled:
        """What runs a graph that nobody plans."""
