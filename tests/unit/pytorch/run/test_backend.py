"""What the backend keeps of a graph that Dynamo found: nothing of the batch that it was found with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.fx import symbolic_trace

from remat.core.budget import parse_budget
from remat.pytorch.run.backend import SessionBackend
from remat.pytorch.run.contract import FoundGraph
from remat.pytorch.run.settings import Settings


class KeepingKernels:
    """Hold on to what they were given, as torch 2.11 holds on to the function that cuts a graph in two."""

    session: Any = SimpleNamespace(settings=Settings(parse_budget("1GiB")), broken=False, left_out=0)

    def tracing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def compile(self, found: FoundGraph) -> Any:
        self.found, self.count = found, len(found.inputs)
        return found.module.forward

    def leave(self, module: Any, inputs: Any) -> Any:
        raise AssertionError("a graph that can be planned is not left")


def test_batch_of_the_first_call_is_not_kept(monkeypatch: Any) -> None:
    monkeypatch.setattr(
        "remat.pytorch.run.backend.graph_end",
        lambda _: SimpleNamespace(is_break=False, is_backward_call=False, function="step"),
    )
    kernels = KeepingKernels()
    given = [torch.ones(2, 2, requires_grad=True)]
    SessionBackend(kernels, "step")(symbolic_trace(nn.Linear(2, 2)), given)
    assert kernels.count == len(given) == 1
    assert kernels.found.inputs == []
