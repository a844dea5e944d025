"""The torch.compile backend: Dynamo hands in a graph, AOTAutograd traces it with its backward, a session plans it.

Whatever cannot be captured runs as before, with a warning that says what was left out and why. Where the step's code
asks whether it is being traced, or breaks into several graphs, what plain eager needs is learnt from that code itself.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from remat.core.budget import BudgetScope, BudgetUnit, parse_budget, parse_budget_scope
from remat.errors import BudgetError, RematError
from remat.pytorch._compat.checkpointed import run_checkpoints_as_eager
from remat.pytorch._compat.dynamo import GraphEnd, aot_autograd, graph_end, questions_noted
from remat.pytorch._compat.fakes import fake_results_through
from remat.pytorch._compat.modes import HigherOrderOperator, without_modes
from remat.pytorch._compat.numbers import StartsOver, changes_shapes, fix_shapes, make_numbers_constant
from remat.pytorch._compat.symbols import Sizes, Symbols
from remat.pytorch._compat.tracing import (
    backward_outside_autocast,
    eager_kernels_while_tracing,
    many_results_compiled,
    opaque_custom_backwards,
)
from remat.pytorch.costs.eager_step import EagerUnknown, eager_step
from remat.pytorch.costs.plain_peak import PlainStep, inputs_at, plain_step
from remat.pytorch.costs.repeated_plain import plain_step_of
from remat.pytorch.graph.instance import open_symbols
from remat.pytorch.graph.long_step import long_step
from remat.pytorch.graph.nodes import is_tangent
from remat.pytorch.graph.real_results import corrected
from remat.pytorch.graph.repeats import NotAlike
from remat.pytorch.graph.shared_casts import share_casts
from remat.pytorch.reach import is_used_up
from remat.pytorch.resident.memory import ResidentMemory
from remat.pytorch.run.conductor import GraphConductor
from remat.pytorch.run.contract import Compiled, FoundGraph, Kernels, StepSession
from remat.pytorch.run.execute import Program, boxed_call, shells
from remat.pytorch.run.gradients.hand_over import arrivals, in_order
from remat.pytorch.run.gradients.twice import differentiable_again
from remat.pytorch.run.session import Session
from remat.pytorch.run.settings import Settings, SizesMatter
from remat.pytorch.run.shapes.known import AnyGraph
from remat.pytorch.run.shapes.open_graph import refuse_untold

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepCall:
    """The call of the step during which graphs are captured."""

    step: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    asked: list[str] = field(default_factory=list)
    """Functions by which the step's code asked whether it is being traced."""
    _eager: PlainStep | str | None = None

    def eager_step(self, device: torch.device) -> PlainStep | str:
        """What the step's own code needs in plain eager, or why that is not known; found once."""
        if self._eager is None:
            try:
                model = getattr(self.step, "__self__", None)
                if not isinstance(model, nn.Module):
                    raise EagerUnknown("only a module can be followed, and this step is a function")
                self._eager = eager_step(model, self.args, self.kwargs, device)
            except EagerUnknown as error:
                # The error itself holds frames, and they the batch.
                self._eager = str(error)
        return self._eager


@dataclass(frozen=True, slots=True)
class EagerKernels:
    """Traces each graph with its backward, and runs both op by op in the order that the session plans."""

    session: Session

    def tracing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def compile(self, found: FoundGraph) -> Compiled:
        programs: list[Program] = []
        graphs: list[AnyGraph] = []

        def partition(joint: GraphModule, _: Any, *, num_fwd_outputs: int, **options: Any) -> tuple[GraphModule, ...]:
            joint = joint if step is None else step.graft(joint)
            handed = used_up if _has_inputs(joint, len(found.inputs)) else frozenset[int]()
            facts = {"alone": found.alone, "breaks_off": found.breaks_off, "handed": handed}
            symbols = open_symbols(joint)
            graph: AnyGraph
            if symbols is None:
                refuse_untold(joint)
                graph = self.session.add_graph(joint, num_fwd_outputs, plain, **facts)
            else:
                graph = self.session.add_open_graph(joint, num_fwd_outputs, symbols, found.plain_at, **facts)
            graphs.append(graph)
            programs.append(Program(graph.full, GraphConductor(self.session, graph), symbols))
            return shells(graph.full)

        compiler = aot_autograd(
            fw_compiler=lambda *_: boxed_call(programs[0].forward),
            bw_compiler=lambda *_: boxed_call(programs[0].backward),
            inference_compiler=lambda graph, _: boxed_call(lambda boxed: graph.forward(*boxed)),
            partition_fn=partition,
        )
        used_up = frozenset(place for place, item in enumerate(found.inputs) if is_used_up(item))
        plain = found.plain_step()
        with backward_outside_autocast(), many_results_compiled():
            with traced_as_eager(found.module):
                step = long_step(found.module, found.inputs)
            compiled: Compiled | None = None
            if step is not None:
                try:
                    compiled = compiler(step.stand_in(), found.inputs)
                except NotAlike as error:
                    _log.info("Every block of the step is traced: %s.", error)
                    step = None
            if compiled is None:
                with traced_as_eager(found.module):
                    compiled = compiler(found.module, found.inputs)
        compiled = differentiable_again(compiled, found.module)
        is_like_given = bool(programs) and _has_inputs(graphs[0].joint, len(found.inputs))
        return in_order(compiled, arrivals(graphs[0].full)) if is_like_given else compiled

    def leave(self, module: GraphModule, inputs: Sequence[Any]) -> Compiled:
        run_checkpoints_as_eager(module)
        return module.forward


def _has_inputs(joint: GraphModule, count: int) -> bool:
    """Whether the graph still takes what Dynamo hands in, each for itself."""
    return sum(node.op == "placeholder" and not is_tangent(node) for node in joint.graph.nodes) == count


class SessionBackend:
    """Hands each graph that Dynamo finds to the kernels of one session, with its place in the step."""

    def __init__(self, kernels: Kernels, root_name: str = "") -> None:
        self._kernels = kernels
        self._root_name = root_name
        self._call: StepCall | None = None
        self.left_ops_of_ops = False
        """Whether a graph that runs unplanned has ops of ops, such as `torch.cond`."""

    @property
    def session(self) -> StepSession:
        return self._kernels.session

    @contextmanager
    def called(self, step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """What is captured meanwhile belongs to this call of the step."""
        self._call = StepCall(step, args, kwargs)
        try:
            with questions_noted(self._call.asked), self._kernels.tracing():
                yield
        finally:
            self._call = None

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Compiled:
        if not needs_gradients(inputs):
            return self._kernels.leave(module, inputs)
        if changes_shapes(module):
            make_numbers_constant(module)
        end = graph_end(module)
        alone = self._is_alone(end)
        breaks_off = end.is_break and not end.is_backward_call
        # What torch keeps of a compiled graph must not keep the first batch alive.
        inputs = list(inputs)
        found = FoundGraph(
            module,
            inputs,
            alone,
            breaks_off,
            lambda: self._plain_step(module, inputs, alone),
            lambda symbols, sizes: self._plain_at(module, inputs, symbols, sizes),
        )
        try:
            with without_modes():
                share_casts(module, inputs)
                return self._kernels.compile(found)
        except StartsOver:
            raise
        except Exception as error:  # torch raises many kinds while tracing; none of them may stop training
            if changes_shapes(module):
                self.session.fixed_because = str(error).strip().split("\n")[0]
                fix_shapes()
            # A gradient may be unknown for a number that changes, and known for each that it is.
            make_numbers_constant(module)
            _warn_left_out(f"A graph of {len(module.graph.nodes)} nodes", error)
            self.session.left_out += 1
            self.left_ops_of_ops |= any(isinstance(node.target, HigherOrderOperator) for node in module.graph.nodes)
            return self._kernels.leave(module, inputs)
        finally:
            inputs.clear()

    def _is_alone(self, end: GraphEnd) -> bool:
        """Whether this graph is the whole forward: the step's own function ends with it and no graph came before."""
        if end.is_break:
            self.session.note_break(end)
            return end.is_backward_call and not self.session.broken
        in_root = end.function == self._root_name if self._root_name else not end.function.startswith("torch_dynamo_")
        return in_root and not self.session.broken

    def _plain_step(self, module: GraphModule, inputs: Sequence[Any], alone: bool) -> PlainStep:
        """What plain eager needs for this graph; from the step's own code where tracing may have taken another path."""
        device = device_of(inputs)
        asked = self._call.asked if self._call is not None else []
        whole = self._call.eager_step(device) if self._call is not None and (asked or not alone) else None
        if alone and isinstance(whole, PlainStep):
            return whole
        with traced_as_eager(module):
            found = plain_step_of(module, inputs, device)
        if isinstance(whole, PlainStep):
            return replace(found, whole=whole)
        if asked and self._is_relative():
            warnings.warn(
                f"The step asks {asked[0]}(), so that it may take another path in plain PyTorch than here; "
                f'"1x" is of the traced path, as the other cannot be followed without running it ({whole}). Give the '
                "budget in bytes to be sure.",
                stacklevel=2,
            )
        return found

    def _plain_at(self, module: GraphModule, inputs: Sequence[Any], symbols: Symbols, sizes: Sizes) -> PlainStep:
        """The same at other sizes than those of the call, where tracing took the path that plain eager takes."""
        if self._call is not None and self._call.asked and self._is_relative():
            raise SizesMatter(f"The step asks {self._call.asked[0]}(), so that it has to be followed at every shape.")
        traced = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
        with traced_as_eager(module):
            return plain_step(module, inputs_at(inputs, traced, symbols, sizes), device_of(inputs))

    def _is_relative(self) -> bool:
        budget = self.session.settings.budget
        return budget is not None and budget.unit is BudgetUnit.PLAIN_FRACTION


@contextmanager
def traced_as_eager(module: GraphModule) -> Iterator[None]:
    """Tracing meanwhile finds the kernels, layouts and custom backwards that eager would use."""
    targets = [node.target for node in module.graph.nodes]
    with eager_kernels_while_tracing(), fake_results_through(corrected), opaque_custom_backwards(targets):
        yield


def remat_backend(module: GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None) -> Compiled:
    """`torch.compile(model, backend="remat", options={"budget": "20GiB"})`."""
    options = dict(options or {})
    if "budget" not in options:
        raise BudgetError('The remat backend needs a budget; write options={"budget": "20GiB"}.')
    unknown = sorted(set(options) - {*_OPTIONS, *_OLD_OPTIONS})
    if unknown:
        raise BudgetError(f"The remat backend has no option {unknown[0]!r}; it has {', '.join(_OPTIONS)}.")
    for old, new in _OLD_OPTIONS.items():
        if old in options:
            warnings.warn(f"The option {old!r} is called {new!r} now.", FutureWarning, stacklevel=2)
            options.setdefault(new, options.pop(old))
    named = {field: options[name] for name, field in _OPTIONS.items() if field and name in options}
    counts = parse_budget_scope(options.get("count", BudgetScope.LIVE))
    settings = Settings(parse_budget(options["budget"]), counts=counts, **named)
    return make_backend(options.get("compiler"), settings, ResidentMemory())(module, inputs)


_OPTIONS = {
    **{"budget": "", "compiler": "", "count": "", "search": "search_s"},
    **{"mode": "mode", "seed": "seed", "solver": "solver", "time_limit": "time_limit_s"},
}
"""Named as in `remat.optimize`, with the fields of `Settings` for those that go there as they are."""
_OLD_OPTIONS = {"search_s": "search", "time_limit_s": "time_limit"}


INDUCTOR = "inductor"


def make_backend(
    compiler: str | None, settings: Settings, owner: ResidentMemory, root_name: str = ""
) -> SessionBackend:
    """For eager kernels, or for the code of a compiler."""
    if compiler is None and settings.mode is not None:
        raise RematError(f'mode={settings.mode!r} is one of torch.compile\'s; write compiler="inductor" with it.')
    if compiler is None:
        return SessionBackend(EagerKernels(Session(settings, owner)), root_name)
    if compiler != INDUCTOR:
        raise RematError(f'There is no compiler {compiler!r}; leave it out for eager kernels, or write "inductor".')
    if settings.counts is not BudgetScope.LIVE:
        raise BudgetError(
            f"The budget of a compiled step counts live bytes, not its {settings.counts}; leave count out, or leave "
            "out compiler for eager kernels."
        )
    from remat.inductor.backend import InductorKernels
    from remat.inductor.session import CompiledSession

    return SessionBackend(InductorKernels(CompiledSession(settings, owner)), root_name)


def needs_gradients(inputs: Sequence[Any]) -> bool:
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def device_of(inputs: Sequence[Any]) -> torch.device:
    devices = [item.device for item in inputs if isinstance(item, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _warn_left_out(what: str, error: Exception) -> None:
    reason = str(error).strip().split("\n")[0]
    warnings.warn(f"{what} runs unplanned: {type(error).__name__}: {reason}", stacklevel=2)
