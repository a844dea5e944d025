"""Parameters as shards: which of their collectives may run twice, and what they are taken to cost."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import distributed, nn

from remat.distributed import assume_link, shard
from remat.distributed.links import PipelineShape, parse_pipeline
from remat.distributed.pretended import pretended
from remat.errors import RematError
from remat.pytorch.costs.collective_costs import state_link
from remat.pytorch.run.optimize import capture_ahead
from remat.pytorch.run.variants import Variant

if not distributed.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)


def _captured() -> Variant:
    torch.manual_seed(0)
    model = shard(nn.Sequential(nn.Linear(31, 16), nn.Tanh(), nn.Linear(16, 4)))
    return capture_ahead(model, (torch.randn(8, 31),), {}).calls[0].variant


def test_gathers_of_parameters_may_run_again_and_nothing_else_that_meets_others() -> None:
    with pretended(4):
        ops = _captured().captured.graph.ops
    gathers = [op for op in ops if "all_gather" in op.target]
    scatters = [op for op in ops if "reduce_scatter" in op.target]
    assert len(gathers) == len(scatters) == 4
    assert all(op.recomputable for op in gathers)
    assert not any(op.recomputable for op in scatters)
    assert not any("wait_tensor" in op.target for op in ops), "waiting makes nothing"


def test_collectives_are_priced_by_the_link_that_was_stated() -> None:
    prices = []
    try:
        with pretended(4):
            for speed in (100.0, 1.0):
                assume_link(gb_per_s=speed, latency_us=0.0)
                variant = _captured()
                pairs = zip(variant.captured.graph.ops, variant.costs().time_ns, strict=True)
                prices.append(sum(time for op, time in pairs if "all_gather" in op.target))
    finally:
        state_link(None)
    # 31 * 16 + 16 + 16 * 4 + 4 numbers, three quarters of which come from others.
    assert prices == pytest.approx([580 * 4 * 0.75 / 100, 580 * 4 * 0.75])


def test_shards_of_all_ranks_are_the_parameter() -> None:
    with pretended(4):
        model = shard(nn.Linear(31, 16))
        assert [tuple(item.shape) for item in model.parameters()] == [(124,), (4,)]
        assert (model.weight + 0).shape == (16, 31)


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(RematError, match="call init_process_group first"):
        shard(nn.Linear(2, 2))
    with pytest.raises(RematError, match="No link has 0 GB/s"):
        assume_link(gb_per_s=0, latency_us=1)
    assert parse_pipeline("pp:4") == PipelineShape(4, 8)
    assert parse_pipeline("ddp") is None
    with pytest.raises(RematError, match="'pp:x' is no pipeline"):
        parse_pipeline("pp:x")
