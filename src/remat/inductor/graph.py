"""One graph that Dynamo captured, and what runs for it.

It is compiled when it is first called, under what its host decides; what cannot be planned runs as torch.compile would
run it, and what torch.compile cannot compile runs in eager. Its life is a union of states:

    Untraced ─▶ Traced ─▶ Ready            compiled, for the budget or to get by until all graphs are known
                   └────▶ ChosenCut ─▶ Ready  chosen for together with other graphs, then compiled
    any ─▶ Unplanned                       nothing can be planned

A plan that is dropped leads back to Traced, another form of the graph to Untraced.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node

from remat.core.results.profile import Phase
from remat.errors import RematError
from remat.inductor.compile import Built, build, build_plainly
from remat.inductor.dry_run.timeline import CannotFollow, KernelTimeline
from remat.inductor.dry_run.workspaces import Workspaces
from remat.inductor.images import laid_out
from remat.inductor.joining import rooms_of
from remat.inductor.kernels.clock import SeenCalls, TimedKernels, time_kernels
from remat.inductor.kernels.learned import KernelPrices
from remat.inductor.loss.rewrite import LossRegion, Rewritten, chunks_for, rewrite_loss
from remat.inductor.model.choose import Choice
from remat.inductor.model.joint import Joint
from remat.inductor.model.program import MeasuredRates
from remat.inductor.model.rates import measure_rates
from remat.inductor.partition import Cut, Instead, Uncut
from remat.inductor.shapes.open_inputs import OpenInputs
from remat.inductor.stages import stage
from remat.inductor.travel import Travel
from remat.pytorch._compat.checkpointed import run_checkpoints_as_eager
from remat.pytorch._compat.symbols import Sizes
from remat.pytorch.costs.plain_peak import PlainStep
from remat.pytorch.run.progress import Reporter
from remat.pytorch.run.settings import SizesMatter

CHUNK_SHARE = 1 / 16
"""Of what a step may need: the most that one chunk of logits takes."""


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """A captured graph with its loss as it was, or in chunks."""

    module: GraphModule
    chunked: tuple[Rewritten, ...] = ()
    """Losses that are computed in chunks."""


@dataclass(frozen=True, slots=True)
class Known:
    """What tracing one form of a graph has told of all that is compiled from it."""

    joint: Joint
    rates: MeasuredRates
    saved_by_torch: frozenset[int] = frozenset()
    """What torch.compile would save by itself; empty where nobody asked."""


@dataclass(frozen=True, slots=True)
class Untraced:
    """Nothing is known of the graph but itself."""


@dataclass(frozen=True, slots=True)
class Traced:
    """Nothing is chosen for it, or no longer: it is planned when it is next called."""

    known: Known


@dataclass(frozen=True, slots=True)
class ChosenCut:
    """A choice was made for it together with other graphs: it is compiled when it is next called."""

    known: Known
    choice: Choice


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """Its code is there."""

    known: Known
    choice: Choice
    built: Built
    is_planned: bool = False
    """Whether the choice was made for the budget, rather than to get by until all graphs are known."""


@dataclass(frozen=True, slots=True)
class Unplanned:
    """Nothing could be planned: this runs instead."""

    call: Callable[..., Any]


State = Untraced | Traced | ChosenCut | Ready | Unplanned


@dataclass(frozen=True, slots=True)
class Decided:
    """A choice for a graph that waits to be cut."""

    choice: Choice
    saved_by_torch: frozenset[int] = frozenset()
    """See `Known`."""
    room_bytes: int | None = None
    """What its code may need: where more is predicted kernels do not become one. None where that is not known."""


Decide = Callable[[Uncut, MeasuredRates], Decided | Form]
"""What to save; or the form of the graph that is to be compiled instead."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Peaks of a compiled graph."""

    steady_bytes: int
    first_bytes: int
    """Of the first step, in which Inductor may also tune kernels: never less."""
    timeline: KernelTimeline | None = None
    """Where the code could be gone through."""
    timed: TimedKernels | None = None
    """On CUDA, where it fits: how long its kernels take."""

    def fit(self, allowed: int) -> bool:
        return self.first_bytes <= allowed


class NothingToPlan(Exception):
    """Inductor compiled a graph without asking for a cut: it has no backward."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__("The graph has no backward.")
        self.call = call


class Host(Protocol):
    """Who knows all graphs of a step."""

    reporter: Reporter
    asked: Mapping[str, Any]
    """Settings of Inductor that the user wants."""

    def enter(self, graph: CompiledGraph, inputs: Sequence[Any]) -> None:
        """The graph is about to run: have it `Ready`."""

    def leave(self, outputs: Sequence[Any]) -> None:
        """A graph has run."""


@dataclass(slots=True)
class CompiledGraph:
    """One graph that Dynamo captured; called in its place."""

    host: Host
    number: int
    module: GraphModule
    """As it was captured."""
    plain: PlainStep
    device: torch.device
    alone: bool
    opened: OpenInputs | None = None
    """Where sizes are left open."""
    form: Form = field(init=False)
    state: State = field(default_factory=Untraced)

    def __post_init__(self) -> None:
        self.form = Form(self.module)

    def __call__(self, *inputs: Any) -> Any:
        if not isinstance(self.state, Unplanned):
            self.prepare(inputs)
        if isinstance(self.state, Unplanned):
            return self.state.call(*inputs)
        assert isinstance(self.state, Ready), "a graph is compiled before it is called"
        outputs = self.state.built.call(*inputs)
        self.host.leave(outputs)
        return outputs

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Get ready to run; what cannot be planned runs as torch.compile would run it, or else in eager."""
        try:
            self.host.enter(self, inputs)
        except RematError:
            raise
        except Exception as error:  # torch raises many kinds while compiling; none of them may stop training
            if self.opened is not None:
                raise SizesMatter(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}") from error
            if isinstance(error, NothingToPlan):
                self.state = Unplanned(error.call)
                return
            self.state = Unplanned(_unplanned(self.form.module, inputs, error))

    @property
    def is_whole_step(self) -> bool:
        """Whether nothing that matters should happen outside: the graph is the whole forward and returns a loss.

        It may return more, such as logits. Where a step goes on with these, all is planned anew.
        """
        outputs: Any = self.module.graph.output_node().args[0]
        values = [node.meta.get("example_value") for node in outputs if isinstance(node, Node)]
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
        return self.alone and (not tensors or any(value.numel() == 1 for value in tensors))

    @property
    def known(self) -> Known:
        """Of a graph that was traced."""
        assert not isinstance(self.state, Untraced | Unplanned), "graphs are compiled before they are planned together"
        return self.state.known

    def compile(self, inputs: Sequence[Any], decide: Decide, travel: Travel | None = None) -> Ready | Form:
        """Code under what `decide` says of the joint graph, or the form that it wants instead; the state stays.

        Inductor asks from within: what `decide` raises, such as a budget that cannot be met, comes up through it.
        """
        decisions: list[Decided | Form] = []

        def ask(uncut: Uncut) -> Cut | Instead:
            self._learn(uncut)
            with stage("Choosing what to save"):
                decision = decide(uncut, self.known.rates)
            decisions.append(decision)
            if isinstance(decision, Form):
                return Instead.NOTHING
            choice, room = decision.choice, decision.room_bytes
            rooms = rooms_of(uncut.joint, choice, room) if room is not None else None
            return Instead.TORCHS_CUT if choice.is_default else Cut(choice.saved, choice.unrolled, rooms)

        built = build(self.form.module, inputs, ask, self.device, self.host.asked, travel, self.opened)
        if built is not None and not decisions:
            raise NothingToPlan(built.call)
        (decision,) = decisions
        if isinstance(decision, Form):
            return decision
        assert built is not None, "what is wanted is compiled"
        saved_by_torch = decision.saved_by_torch or self.known.saved_by_torch
        self.state = _knowing(self.state, replace(self.known, saved_by_torch=saved_by_torch))
        return Ready(self.known, decision.choice, built)

    def compile_under(self, inputs: Sequence[Any], decide: Callable[[Uncut, MeasuredRates], Decided]) -> Ready:
        """The same where the form is settled."""
        made = self.compile(inputs, decide)
        assert isinstance(made, Ready), "a choice leads to code"
        return made

    def _learn(self, uncut: Uncut) -> None:
        """Measure what the graph's kernels cost when it is first traced."""
        if isinstance(self.state, Untraced):
            factors = KernelPrices(self.device).load() if self.device.type == "cuda" else {}
            with self.host.reporter.profiling() as progress, stage("Measuring kernels that run alone"):
                rates = measure_rates(uncut.joint, laid_out(uncut.nodes, self.device), self.device, factors, progress)
            self.state = Traced(Known(uncut.joint, rates))

    def price(self, factors: Mapping[str, float]) -> None:
        """Take fused kernels to cost what those that were timed have cost."""
        rates = self.known.rates
        known = replace(self.known, rates=replace(rates, factors={**rates.factors, **factors}))
        self.state = _knowing(self.state, known)

    def covers(self, sizes: Sizes) -> bool:
        """Whether code that leaves sizes open runs at these, within what it was planned for."""
        if self.opened is None or any(size > most for size, most in zip(sizes, self.opened.most, strict=True)):
            return False
        symbols = self.state.built.symbols if isinstance(self.state, Ready) else None
        return symbols is not None and symbols.may_be(sizes)

    def further_bytes(self, inputs: Sequence[Any]) -> int:
        """By how much inputs may grow under the plan that is made at this call."""
        return self.opened.further_bytes(inputs) if self.opened is not None else 0

    def settle(self, ready: Ready) -> None:
        """Run this code from now on; prices that were learnt after it was chosen are kept for the next choice."""
        learnt = not isinstance(self.state, Untraced | Unplanned) and self.known.joint is ready.known.joint
        self.state = replace(ready, known=self.known if learnt else ready.known, is_planned=True)

    def drop_code(self) -> None:
        """Plan anew when it is next called; what is known of it stays."""
        if isinstance(self.state, ChosenCut | Ready):
            self.state = Traced(self.state.known)

    def take(self, form: Form) -> None:
        """Be another form of the graph, of which nothing is known."""
        self.form, self.state = form, Untraced()

    def with_chunks(self, budget_bytes: int) -> Form | None:
        """The graph with its loss in chunks; None where it has none that can be cut."""

        def count(region: LossRegion) -> int:
            wanted = chunks_for(region)
            return max(wanted, chunks_for(region, int(CHUNK_SHARE * budget_bytes))) if wanted else 0

        return self._with_loss(count)

    def with_loss_in(self, chunks: Sequence[int]) -> Form | None:
        """The graph with each of its losses in so many chunks; None where it has none that can be cut."""
        waiting = iter(chunks)
        return self._with_loss(lambda region: next(waiting, 0) if chunks_for(region) else 0)

    def _with_loss(self, count: Callable[[LossRegion], int]) -> Form | None:
        module = copy.deepcopy(self.form.module)
        found = tuple(item for item in rewrite_loss(module, count) if isinstance(item, Rewritten))
        return Form(module, found) if found else None

    def other_form(self, budget_bytes: int) -> Form | None:
        """The graph with its loss in chunks, or where it is, as a whole again; None where there is none to be cut."""
        return Form(self.module) if self.form.chunked else self.with_chunks(budget_bytes)

    def needs(self, ready: Ready, workspaces: Workspaces, allowed: int) -> Needs:
        """What its code needs beyond what is there when it begins; where it may need that, its kernels are timed."""
        seen = SeenCalls()
        try:
            with stage("Going through the code"):
                timeline = ready.built.timeline(self.device, workspaces, seen.note)
        except CannotFollow as error:
            warnings.warn(f"The compiled step's peak is only estimated: {error}", stacklevel=2)
            predicted = ready.choice.prediction.peak_bytes
            return Needs(predicted, predicted)
        slack = timeline.slack_bytes if self.device.type == "cuda" else 0
        steady = timeline.peak_bytes + slack
        if self.device.type != "cuda" or steady > allowed:
            return Needs(steady, steady, timeline)
        with stage("Timing its kernels"):
            timed = _timed(ready.built, seen, self.device, allowed)
        names = {call.name for call in timed.untimed}
        late = [call.live_bytes for call in timeline.calls if call.name in names]
        first = max(late, default=0) + workspaces.tuning_bytes + slack
        return Needs(steady, max(steady, first if late else 0), timeline, timed)


def _timed(built: Built, seen: SeenCalls, device: torch.device, allowed: int) -> TimedKernels:
    found = time_kernels(built.forward, seen.of(Phase.FORWARD), device, allowed)
    if built.backward is not None:
        found = found.and_(time_kernels(built.backward, seen.of(Phase.BACKWARD), device, allowed))
    torch.cuda.empty_cache()
    return found


def _knowing(state: State, known: Known) -> State:
    """The same state, knowing more."""
    return state if isinstance(state, Untraced | Unplanned) else replace(state, known=known)


def left_to_torch(
    module: GraphModule, inputs: Sequence[Any], what: str, *, quietly: bool = False
) -> Callable[..., Any]:
    """As torch.compile would, or in eager where it cannot; says `what`, but `quietly` only in the second case."""
    try:
        call = build_plainly(module, inputs)
    except Exception:  # torch raises many kinds while compiling; none of them may stop training
        warnings.warn(f"{what}, and torch.compile cannot compile it; it runs in eager.", stacklevel=4)
        return in_eager(module)
    if not quietly:
        warnings.warn(f"{what}; it runs as torch.compile runs it.", stacklevel=4)
    return call


def in_eager(module: GraphModule) -> Callable[..., Any]:
    """The graph as it was captured, op by op."""
    run_checkpoints_as_eager(module)
    return module.forward


def _unplanned(module: GraphModule, inputs: Sequence[Any], error: Exception) -> Callable[..., Any]:
    reason = str(error).strip().split("\n")[0]
    what = f"A graph of {len(module.graph.nodes)} nodes is not planned ({type(error).__name__}: {reason})"
    return left_to_torch(module, inputs, what)
