"""Checkpointed regions in graphs that run unplanned draw the same random numbers again, as in eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from remat.pytorch._compat.checkpointed import run_checkpoints_as_eager


def keeping_matmuls(_context, op, *_args, **_kwargs):
    is_matmul = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.MUST_RECOMPUTE


OPTIONS = {
    "as it is": {},
    "selective": {"context_fn": lambda: create_selective_checkpoint_contexts(keeping_matmuls)},
}


class Model(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        region = lambda h: F.dropout(self.layer(F.gelu(h)), 0.5)  # noqa: E731
        return checkpoint(region, x, use_reentrant=False, **self.options).pow(2).sum()


def left_alone(module, inputs):
    run_checkpoints_as_eager(module)
    return module.forward


def gradient(model, call, x):
    model.zero_grad()
    torch.manual_seed(3)
    call(x).backward()
    return model.layer.weight.grad.clone()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_graph_left_alone_has_the_gradients_of_eager(options):
    model, x = Model(options), torch.randn(16, 8)
    compiled = torch.compile(model, backend=left_alone)
    assert torch.equal(gradient(model, model, x), gradient(model, compiled, x))


def test_torchs_own_op_does_not():
    model, x = Model(OPTIONS["selective"]), torch.randn(16, 8)
    compiled = torch.compile(model, backend="eager")
    assert not torch.equal(gradient(model, model, x), gradient(model, compiled, x))
