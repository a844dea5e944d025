"""The torch.compile backend: Dynamo hands in a graph, AOTAutograd traces it with its backward, a session plans it.

Whatever cannot be captured runs as before, with a warning that says what was left out and why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from remat.core.budget import Count, parse_budget, parse_count
from remat.errors import BudgetError, RematError
from remat.pytorch._compat import (
    GraphEnd,
    aot_autograd,
    backward_outside_autocast,
    eager_kernels_while_tracing,
    graph_end,
    opaque_custom_backwards,
    without_modes,
)
from remat.pytorch.execute import Program, boxed_call, shells
from remat.pytorch.owner import Owner
from remat.pytorch.plain import plain_step
from remat.pytorch.session import GraphConductor, Session, Settings

Compiled = Callable[..., Any]


class SessionBackend:
    """Compiles Dynamo's graphs into programs of one session."""

    def __init__(self, session: Any, root_name: str = "") -> None:
        self.session = session
        self._root_name = root_name

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Compiled:
        if not needs_gradients(inputs):
            return self._unplanned(module, inputs)
        end = graph_end(module)
        alone = self._is_alone(end)
        try:
            with without_modes():
                return self._compile(module, inputs, alone, end.is_break and not end.is_backward_call)
        except Exception as error:  # torch raises many kinds while tracing; none of them may stop training
            _warn_left_out(f"A graph of {len(module.graph.nodes)} nodes", error)
            self.session.left_out += 1
            return self._unplanned(module, inputs)

    def _unplanned(self, module: GraphModule, inputs: Sequence[Any]) -> Compiled:
        return module.forward

    def _compile(self, module: GraphModule, inputs: Sequence[Any], alone: bool, breaks_off: bool) -> Compiled:
        programs: list[Program] = []

        def partition(joint: GraphModule, _: Any, *, num_fwd_outputs: int, **options: Any) -> tuple[GraphModule, ...]:
            graph = self.session.add_graph(joint, num_fwd_outputs, plain, alone=alone, breaks_off=breaks_off)
            programs.append(Program(graph.full, GraphConductor(self.session, graph)))
            return shells(graph.full)

        compiler = aot_autograd(
            fw_compiler=lambda *_: boxed_call(programs[0].forward),
            bw_compiler=lambda *_: boxed_call(programs[0].backward),
            inference_compiler=lambda graph, _: boxed_call(lambda boxed: graph.forward(*boxed)),
            partition_fn=partition,
        )
        targets = [node.target for node in module.graph.nodes]
        with eager_kernels_while_tracing(), backward_outside_autocast(), opaque_custom_backwards(targets):
            plain = plain_step(module, inputs, device_of(inputs))
            compiled: Compiled = compiler(module, inputs)
        return compiled

    def _is_alone(self, end: GraphEnd) -> bool:
        """Whether this graph is the whole forward: the step's own function ends with it and no graph came before."""
        if end.is_break:
            self.session.note_break(end)
            return end.is_backward_call and not self.session.broken
        in_root = end.function == self._root_name if self._root_name else not end.function.startswith("torch_dynamo_")
        return in_root and not self.session.broken


def remat_backend(module: GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None) -> Compiled:
    """`torch.compile(model, backend="remat", options={"budget": "20GiB"})`."""
    options = dict(options or {})
    if "budget" not in options:
        raise BudgetError('The remat backend needs a budget; write options={"budget": "20GiB"}.')
    known = {"compiler", "count", "search_s", "seed", "solver", "time_limit_s"}
    unknown = sorted(set(options) - known - {"budget"})
    if unknown:
        raise BudgetError(f"The remat backend has no option {unknown[0]!r}; it has budget, {', '.join(sorted(known))}.")
    compiler = options.pop("compiler", None)
    counts = parse_count(options.pop("count", Count.LIVE))
    settings = Settings(parse_budget(options.pop("budget")), counts=counts, **options)
    return make_backend(compiler, settings, Owner())(module, inputs)


def make_backend(compiler: str | None, settings: Settings, owner: Owner, root_name: str = "") -> SessionBackend:
    """For eager kernels, or for the code of a compiler."""
    if compiler is None:
        return SessionBackend(Session(settings, owner), root_name)
    if compiler != "inductor":
        raise RematError(f'There is no compiler {compiler!r}; leave it out for eager kernels, or write "inductor".')
    if settings.counts is not Count.LIVE:
        raise BudgetError(
            f"The budget of a compiled step counts live bytes, not its {settings.counts}; leave count out, or leave "
            "out compiler for eager kernels."
        )
    from remat.inductor.backend import CompiledBackend
    from remat.inductor.session import CompiledSession

    return CompiledBackend(CompiledSession(settings, owner), root_name)


def needs_gradients(inputs: Sequence[Any]) -> bool:
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def device_of(inputs: Sequence[Any]) -> torch.device:
    devices = [item.device for item in inputs if isinstance(item, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _warn_left_out(what: str, error: Exception) -> None:
    reason = str(error).strip().split("\n")[0]
    warnings.warn(f"{what} runs unplanned: {type(error).__name__}: {reason}", stacklevel=2)
