"""Following a step: every byte belongs to a class, and storages know when they were made, used and dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.support.nets import batch, stack
from torch import nn

import remat
from remat import zoo
from remat.core.results.profile import BEFORE, MemoryClass, Phase, StepProfile
from remat.pytorch._compat.fakes import FakeTensorMode
from remat.pytorch.measure.clocks import WallClock
from remat.pytorch.measure.cpu_ledger import CpuLedger
from remat.pytorch.measure.follow import Follower
from remat.pytorch.measure.ledger import StorageLedger
from remat.pytorch.measure.training_step import TrainingStep
from remat.pytorch.reach import reachable_from, reachable_modules

CPU = torch.device("cpu")


def follow(step: Callable[[], Any], ledger: Any = None) -> tuple[StepProfile, Any]:
    ledger = ledger or CpuLedger(CPU)
    follower = Follower(ledger, WallClock(), reachable_modules(step))
    follower.expect(reachable_from(step))
    with follower.following():
        step()
    return follower.profile("step", "cpu", 0.0), ledger


def naive_totals(ledger: CpuLedger, start: int) -> list[int]:
    """The most in memory at each op, counted event by event, without a look at storages or classes.

    What an op frees counts until it is over; what is allocated between two ops belongs to the second.
    """
    totals = []
    current, place = start, 0
    sizes: dict[int, int] = {}
    born: dict[int, int] = {}
    events = ledger.events.allocations
    for begin, end in ledger.events.ranges:
        dropped, window, highest = 0, place, 0
        while place < len(events) and events[place][0] <= end:
            moment, address, size = events[place]
            if size > 0:
                sizes[address], born[address] = size, place
                current += size
                highest = max(highest, current)
            elif address in sizes:
                gone = sizes.pop(address)
                current -= gone
                dropped += gone if moment >= begin and born[address] < window else 0
            place += 1
        totals.append(max(current + dropped, highest))
    return totals


@pytest.mark.parametrize("name", list(zoo.REGISTRY))
def test_classes_add_up_to_what_the_allocator_handed_out_at_every_op(name: str) -> None:
    example = zoo.build(name)
    optimizer = torch.optim.AdamW(example.model.parameters())
    step = TrainingStep(example.model, example.args, dict(example.kwargs), optimizer)
    step()
    profile, ledger = follow(step)
    classes = [sum(parts) for parts in zip(*profile.bytes_by_class().values(), strict=True)]
    assert classes == naive_totals(ledger, profile.start_bytes)
    assert tuple(classes) == profile.during_bytes
    # Whatever is not followed would hide here.
    assert max(profile.bytes_by_class()[MemoryClass.OTHER]) == 0


@pytest.mark.parametrize("name", list(zoo.REGISTRY))
def test_following_changes_nothing_about_the_peak(name: str) -> None:
    example = zoo.build(name)
    profile, _ = follow(TrainingStep(example.model, example.args, dict(example.kwargs)))
    assert profile.peak_bytes == remat.measure(example.model, *example.args, **example.kwargs).peak_bytes


@pytest.mark.parametrize("name", ["gpt", "resnet18"])
def test_storages_alone_tell_the_same_as_the_allocator_but_for_workspace(name: str) -> None:
    example = zoo.build(name)
    step = TrainingStep(example.model, example.args, dict(example.kwargs))
    step()
    exact, _ = follow(step)
    alone, _ = follow(step, StorageLedger(CPU))
    assert [op.live_bytes for op in alone.ops] == [op.live_bytes for op in exact.ops]


def test_fake_tensors_are_followed_like_real_ones() -> None:
    real, _ = follow(TrainingStep(stack(dropout=0.0), (batch(),)), StorageLedger(CPU))
    with FakeTensorMode():
        fake, _ = follow(TrainingStep(stack(dropout=0.0), (torch.empty(256, 32),)), StorageLedger(CPU))
    assert [op.live_bytes for op in fake.ops] == [op.live_bytes for op in real.ops]
    assert [(op.target, op.module) for op in fake.ops] == [(op.target, op.module) for op in real.ops]


def test_modules_and_phases_of_ops() -> None:
    model = stack(depth=2, dropout=0.0)
    profile, _ = follow(TrainingStep(model, (batch(),), {}, torch.optim.SGD(model.parameters(), lr=0.1)))
    found = [(op.phase, op.module, op.target.split(".")[1]) for op in profile.ops]
    assert (Phase.FORWARD, "body.layers.1", "addmm") in found
    assert (Phase.FORWARD, "body", "gelu") in found
    assert (Phase.BACKWARD, "body.layers.1", "mm") in found
    assert (Phase.BACKWARD, "body", "gelu_backward") in found
    assert found[-1][0] is Phase.OPTIMIZER
    order = [phase for phase, _, _ in found]
    assert order == sorted(order, key=list(Phase).index)


def test_activation_knows_when_it_is_made_used_needed_and_dropped() -> None:
    weight = nn.Parameter(torch.randn(64, 64))

    def step() -> None:
        hidden = (torch.ones(64, 64) @ weight).sigmoid()
        del hidden  # what backward needs of it stays
        kept = (weight * 2).exp()
        kept.sum().backward()

    profile, _ = follow(step)
    (kept,) = [item for item in profile.storages if item.name == "aten.exp.default"]
    targets = [op.target.split(".")[1] for op in profile.ops]
    assert kept.kind is MemoryClass.ACTIVATION
    assert targets[kept.created] == "exp"
    assert targets[kept.last_forward_use] == "sum"
    assert profile.ops[kept.first_backward_use].phase is Phase.BACKWARD
    assert targets[kept.first_backward_use] == "mul"
    assert kept.recompute_ns == profile.ops[kept.created].time_ns
    assert profile.idle_ns(kept) > 0
    (dropped,) = [item for item in profile.storages if item.name == "aten.sigmoid.default"]
    assert (dropped.freed, dropped.first_backward_use) == (dropped.created, BEFORE)


def test_gradients_and_state_have_their_class_from_birth() -> None:
    model = stack(depth=2)
    profile, _ = follow(TrainingStep(model, (batch(),), {}, torch.optim.AdamW(model.parameters())))
    parameters = sum(parameter.numel() * 4 for parameter in model.parameters())
    sums = {kind: sum(s.size_bytes for s in profile.storages if s.kind is kind) for kind in MemoryClass}
    assert sums[MemoryClass.PARAMETER] == sums[MemoryClass.GRADIENT] == parameters
    assert sums[MemoryClass.OPTIMIZER_STATE] == 2 * parameters + 4 * len(list(model.parameters()))
    assert sums[MemoryClass.INPUT] == batch().numel() * 4
    names = {item.name: item for item in profile.storages}
    assert names["gradient of body.layers.0.weight"].module == "body.layers.0"
    assert profile.ops[names["gradient of body.layers.0.weight"].created].phase is Phase.BACKWARD
    assert profile.ops[names["exp_avg of body.layers.0.weight"].created].phase is Phase.OPTIMIZER


def test_gradient_clipping_belongs_to_the_optimizer() -> None:
    model = stack(depth=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(batch()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    profile, _ = follow(step)
    norms = [op for op in profile.ops if "norm" in op.target]
    assert {op.phase for op in norms} == {Phase.OPTIMIZER}
    assert profile.ops[-1].phase is Phase.OPTIMIZER


def test_checkpointed_region_is_recomputed_in_its_module() -> None:
    inner = stack(depth=2, dropout=0.0)

    def step() -> None:
        x = batch().requires_grad_()
        torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False).backward()

    profile, _ = follow(step)
    again = [op for op in profile.ops if op.target == "aten.addmm.default" and op.phase is Phase.RECOMPUTE]
    assert [op.module for op in again] == ["body.layers.0", "body.layers.1"]
    assert profile.ops[-1].phase is Phase.BACKWARD


def test_data_loaded_in_the_step_is_input() -> None:
    model = stack(depth=1)

    def step() -> None:
        x = torch.randn(256, 32) * 2
        model(x).backward()

    profile, _ = follow(step)
    loaded = [item for item in profile.storages if item.name in ("aten.randn.default", "aten.mul.Tensor")]
    assert loaded[0].kind is loaded[1].kind is MemoryClass.INPUT


def test_workspace_of_a_kernel_is_not_an_activation() -> None:
    x = torch.randn(1024)

    def step() -> None:
        torch.sort(x)

    profile, _ = follow(step)
    assert profile.breakdown()[MemoryClass.ACTIVATION] == (4 + 8) * 1024
    assert sum(profile.breakdown().values()) == remat.measure(step).peak_bytes


def test_resized_storage_counts_as_what_it_is() -> None:
    x = torch.randn(256)

    def step() -> None:
        grown = x + 1
        grown.untyped_storage().resize_(8192)
        grown * 2

    profile, ledger = follow(step)
    classes = [sum(parts) for parts in zip(*profile.bytes_by_class().values(), strict=True)]
    assert classes == naive_totals(ledger, profile.start_bytes)
    assert profile.ops[-1].live_bytes == 1024 + 8192 + 1024
