"""An offloaded optimizer gives the bits of a plain one: any kind, any kernels, with everything people put around it."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import bench_optimizer_offload
from tests.support.late_engines import LateEngines
from tests.unit.pytorch.random_module import WIDTH, RandomModule
from torch import nn
from torch.optim import Optimizer

import remat
from remat.errors import BudgetError, OffloadFailed, RematError
from remat.pytorch.host import state_away, store
from remat.pytorch.host.state_away import MASTER
from remat.pytorch.resident.memory import ResidentMemory
from remat.pytorch.resident.optimizer_state import pending_state_bytes

STEPS = 20
Make = Callable[[Any], Optimizer]
KINDS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True, amsgrad=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.1, maximize=True),
    "adam tensor lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01)),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}


@pytest.fixture(autouse=True)
def everything_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a small model are worth a copy, so that there is something to see."""
    monkeypatch.setattr(state_away, "SMALL_BYTES", 16)


def batches(count: int = STEPS, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    yield from (torch.randn(16, WIDTH, generator=generator).to(dtype) for _ in range(count))


def train(model: nn.Module, optimizer: Optimizer, data: Any) -> None:
    for batch in data:
        torch.manual_seed(int(batch[0, 0] * 1e6))
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()


def offloaded(optimizer: Optimizer, offload: str = "cpu", **options: Any) -> Optimizer:
    return remat.offload_optimizer(optimizer, offload, **{"device_bytes": 1500, **options})


def assert_same(plain: nn.Module, other: nn.Module) -> None:
    pairs = zip(plain.named_parameters(), other.parameters(), strict=True)
    assert [name for (name, left), right in pairs if not torch.equal(left, right)] == []


def assert_same_state(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right) and left.dtype == right.dtype
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same_state(left[key], right[key])
    else:
        assert left == right


@pytest.mark.parametrize("kind", KINDS)
def test_updates_and_saved_state_have_the_same_bits(kind: str) -> None:
    plain, other = RandomModule(3), RandomModule(3)
    one, two = KINDS[kind](plain.parameters()), offloaded(KINDS[kind](other.parameters()))
    train(plain, one, batches())
    train(other, two, batches())
    assert_same(plain, other)
    assert_same_state(one.state_dict(), two.state_dict())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", ["cpu", "disk"])
def test_random_modules_with_groups_resumed_in_the_middle(seed: int, level: str, tmp_path: Path) -> None:
    def made(module: nn.Module) -> Optimizer:
        members = list(module.parameters())
        return torch.optim.AdamW([{"params": members[:5], "lr": 0.02}, {"params": members[5:], "betas": (0.5, 0.7)}])

    plain, first, second = RandomModule(seed), RandomModule(seed), RandomModule(seed + 100)
    data, where = list(batches()), "cpu" if level == "cpu" else f"disk:{tmp_path}"
    train(plain, made(plain), data)
    optimizer = offloaded(made(first), where)
    train(first, optimizer, data[:9])
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    second.kinds, second.norms = plain.kinds, copy.deepcopy(first.norms)
    second.load_state_dict(saved["model"])
    resumed = offloaded(made(second), where)
    resumed.load_state_dict(saved["optimizer"])
    train(second, resumed, data[9:])
    assert_same(plain, second)
    train(first, optimizer, data[9:])
    assert_same(plain, first)


@pytest.mark.parametrize("seed", range(5))
def test_copies_that_are_late_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other = RandomModule(seed), RandomModule(seed)
    train(plain, KINDS["adamw"](plain.parameters()), batches(6))
    monkeypatch.setattr(store, "engines_of", lambda _: LateEngines(seed))
    train(other, offloaded(KINDS["adamw"](other.parameters())), batches(6))
    assert_same(plain, other)


def test_saved_state_goes_both_ways_between_plain_and_offloaded() -> None:
    plain, other = RandomModule(1), RandomModule(1)
    data, make = list(batches()), KINDS["adamw"]
    one, two = make(plain.parameters()), offloaded(make(other.parameters()))
    train(plain, one, data[:5])
    train(other, two, data[:5])
    # Each goes on from what the other saved.
    swapped, back = make(other.parameters()), offloaded(make(plain.parameters()))
    swapped.load_state_dict(copy.deepcopy(two.state_dict()))
    back.load_state_dict(one.state_dict())
    train(plain, back, data[5:])
    train(other, swapped, data[5:])
    assert_same(plain, other)
    assert_same_state(swapped.state_dict(), back.state_dict())


def test_hooks_of_saving_and_loading_see_what_they_always_saw() -> None:
    model, seen = RandomModule(2), list[str]()
    optimizer = offloaded(KINDS["adamw"](model.parameters()))
    train(model, optimizer, batches(2))

    def look(when: str, state: Any) -> None:
        assert all(isinstance(item["exp_avg"], torch.Tensor) for item in state.values() if item)
        seen.append(when)

    optimizer.register_state_dict_pre_hook(lambda own: look("saves", own.state))
    optimizer.register_state_dict_post_hook(lambda own, saved: look("saved", saved["state"]))
    optimizer.register_load_state_dict_pre_hook(lambda own, loaded: look("loads", loaded["state"]))
    optimizer.register_load_state_dict_post_hook(lambda own: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["saves", "saved", "loads", "loaded"]
    assert all("exp_avg" not in state for state in optimizer.state.values())


def test_its_own_saved_state_can_be_loaded_again() -> None:
    model = RandomModule(2)
    optimizer = offloaded(KINDS["adamw"](model.parameters()))
    train(model, optimizer, batches(4))
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same_state(before, optimizer.state_dict())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["adamw", "sgd momentum"])
def test_updates_in_backward_have_the_bits_of_those_after_it(seed: int, kind: str) -> None:
    plain, other = RandomModule(seed), RandomModule(seed)
    train(plain, KINDS[kind](plain.parameters()), batches())
    optimizer = offloaded(KINDS[kind](other.parameters()), in_backward=True)
    train(other, optimizer, batches(5))
    members = list(other.parameters())
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(other, optimizer, list(batches())[5:])
    assert_same(plain, other)
    assert all(parameter.grad is None for parameter in members)


def test_updates_in_backward_leave_few_gradients() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(12)))
    optimizer = offloaded(torch.optim.AdamW(model.parameters()), in_backward=True, device_bytes=3 * 512)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        # One bucket waits for the next one.
        assert sum(parameter.grad is not None for parameter in model.parameters()) == 1
        optimizer.step()
        assert all(parameter.grad is None for parameter in model.parameters())


def test_updates_in_backward_of_parameters_used_twice_frozen_joining_and_half_precise() -> None:
    def losses(early: bool) -> list[float]:
        torch.manual_seed(0)
        first, last, frozen = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        model = nn.Sequential(first, nn.Tanh(), frozen, first, last, nn.Tanh(), last).bfloat16()
        optimizer = torch.optim.AdamW(first.parameters(), lr=0.05)
        offloaded(optimizer, in_backward=early, master_weights=True)
        found = []
        for number in range(8):
            if number == 3:
                optimizer.add_param_group({"params": list(last.parameters()), "lr": 0.01})
            if number == 5:
                frozen.requires_grad_(True)
            loss = model(torch.ones(4, 8).bfloat16()).float().square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(early=True) == losses(early=False)


def test_gradients_dropped_after_backward_are_not_applied() -> None:
    parameters = [nn.Parameter(torch.ones(100)) for _ in range(4)]
    optimizer = offloaded(torch.optim.Adam(parameters), in_backward=True, device_bytes=3)
    for _ in range(2):
        torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
        waiting = [parameter.grad is not None for parameter in parameters]
        before = [parameter.detach().clone() for parameter in parameters]
        optimizer.zero_grad()
        optimizer.step()
        assert sum(waiting) == 1 and all(map(torch.equal, parameters, before))


def test_second_backward_before_a_step_is_told_once() -> None:
    parameters = [nn.Parameter(torch.ones(100)) for _ in range(3)]
    optimizer = offloaded(torch.optim.SGD(parameters, lr=1.0), in_backward=True, device_bytes=3)

    def loss() -> torch.Tensor:
        return torch.stack([parameter.sum() for parameter in parameters]).sum()

    with pytest.warns(UserWarning, match="A second backward came before optimizer.step") as told:
        for _ in range(3):
            loss().backward()
    assert len(told) == 1
    optimizer.step()
    # Nothing is lost: each of them was applied.
    assert [parameter.detach().unique().tolist() for parameter in parameters] == [[-2.0]] * 3


def test_updates_in_backward_are_refused_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RematError, match="Processes that train together add up their gradients after backward"):
        offloaded(KINDS["adamw"](RandomModule(0).parameters()), in_backward=True)


class NaiveMasters:
    """Master weights without any offloading: the update that the offloaded one must equal."""

    def __init__(self, model: nn.Module, make: Make) -> None:
        self.pairs = [(item, nn.Parameter(item.detach().float())) for item in model.parameters()]
        self.optimizer = make([master for _, master in self.pairs])

    def zero_grad(self) -> None:
        for parameter, master in self.pairs:
            parameter.grad = master.grad = None

    def step(self) -> None:
        for parameter, master in self.pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in self.pairs:
                if parameter.grad is not None:
                    parameter.copy_(master)


@pytest.mark.parametrize("kind", ["adamw", "adamw fused", "sgd", "sgd momentum", "adafactor"])
@pytest.mark.parametrize("small_bytes", [16, 100])
def test_master_weights_have_the_bits_of_naive_ones(
    kind: str, small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_away, "SMALL_BYTES", small_bytes)
    plain, other, third = (RandomModule(4).to(torch.bfloat16) for _ in range(3))
    data = list(batches(dtype=torch.bfloat16))
    train(plain, NaiveMasters(plain, KINDS[kind]), data)  # type: ignore[arg-type]
    optimizer = offloaded(KINDS[kind](other.parameters()), master_weights=True)
    train(other, optimizer, data[:11])
    # A model that is loaded, and after it the state with its master weights.
    third.load_state_dict(other.state_dict())
    resumed = offloaded(KINDS[kind](third.parameters()), master_weights=True)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(third, resumed, data[11:])
    train(other, optimizer, data[11:])
    assert_same(plain, other)
    assert_same(plain, third)


def test_master_weights_keep_what_bf16_would_lose() -> None:
    parameter = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
    optimizer = offloaded(torch.optim.SGD([parameter], lr=1e-3), master_weights=True)
    for _ in range(8):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert torch.equal(parameter, torch.full((16,), 0.992).bfloat16())
    assert torch.allclose(optimizer.state_dict()["state"][0][MASTER], torch.tensor(0.992))


def test_weights_that_somebody_loads_replace_their_master_weights() -> None:
    parameter = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
    optimizer = offloaded(torch.optim.SGD([parameter], lr=0.25), master_weights=True)
    with torch.no_grad():
        parameter[:8] = 3.0
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert parameter.tolist() == [2.75] * 8 + [0.75] * 8


def test_state_is_away_between_steps() -> None:
    model = RandomModule(0)
    optimizer = offloaded(KINDS["adamw"](model.parameters()))
    assert pending_state_bytes(optimizer, torch.device("cpu")) == 0
    train(model, optimizer, batches(2))
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert kept and all(value.numel() == 1 for value in kept)
    saved = optimizer.state_dict()["state"]
    assert all(state["exp_avg"].shape == item.shape for state, item in zip(saved.values(), model.parameters()))  # noqa: B905
    assert all(value.numel() == 1 for state in optimizer.state.values() for value in state.values())


def test_plans_count_what_stays_alone() -> None:
    model = RandomModule(0)
    plain = torch.optim.AdamW(model.parameters())
    memory = ResidentMemory(model, [plain])
    before = memory.residents(torch.device("cpu")).bytes_by_class["optimizer state"]
    offloaded(plain)
    for _ in range(2):
        after = memory.residents(torch.device("cpu")).bytes_by_class["optimizer state"]
        assert after < before / 20
        train(model, plain, batches(1))


def test_few_buckets_are_on_the_device_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.ones(100)) for _ in range(30)]
    optimizer = offloaded(torch.optim.Adam(parameters), device_bytes=3 * 1600)
    seen: list[int] = []
    update = optimizer.remat_away._update  # type: ignore[attr-defined]

    def watched(inner: Optimizer) -> None:
        # Of an earlier test, nothing that waits to be collected.
        alive = [item for item in gc.get_objects() if isinstance(item, torch.Tensor) and item.shape == (100,)]
        known = {item.data_ptr() for item in (*parameters, *(parameter.grad for parameter in parameters))}  # type: ignore[union-attr]
        seen.append(len({item.data_ptr() for item in alive} - known))
        update(inner)

    for parameter in parameters:
        parameter.grad = torch.ones(100)
    optimizer.step()
    monkeypatch.setattr(optimizer.remat_away, "_update", watched)  # type: ignore[attr-defined]
    gc.collect()
    optimizer.step()
    # Two parameters of two tensors each in a bucket; those of one bucket come, of one are updated, of one go.
    assert len(seen) == 15 and max(seen) <= 3 * 4


def test_hooks_schedulers_closures_and_zero_grad_work_as_before() -> None:
    plain, other = RandomModule(5), RandomModule(5)
    calls: dict[str, list[str]] = {"plain": [], "other": []}
    for name, model in (("plain", plain), ("other", other)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        early = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        optimizer.register_step_pre_hook(lambda *_, name=name: calls[name].append("pre"))
        if name == "other":
            assert offloaded(optimizer) is optimizer
        optimizer.register_step_post_hook(lambda *_, name=name: calls[name].append("post"))
        late = torch.optim.lr_scheduler.LinearLR(optimizer, 0.3, total_iters=8)
        for batch in batches(10):

            def closure(model: nn.Module = model, optimizer: Optimizer = optimizer, batch: Any = batch) -> Any:
                torch.manual_seed(0)
                optimizer.zero_grad()
                loss = model(batch)
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0
            early.step()
            late.step()
    assert_same(plain, other)
    assert calls["plain"] == calls["other"] == ["pre", "post"] * 10
    assert isinstance(optimizer, torch.optim.SGD) and repr(optimizer).startswith("SGD (")


@pytest.mark.parametrize("kind", ["adamw", "adamw fused"])
def test_gradient_scaler_skips_and_unscales_as_before(kind: str) -> None:
    plain, other = RandomModule(6), RandomModule(6)
    for model in (plain, other):
        optimizer = KINDS[kind](model.parameters())
        if model is other:
            offloaded(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        for number, batch in enumerate(batches(8)):
            optimizer.zero_grad()
            torch.manual_seed(number)
            scaler.scale(model(batch) * (float("inf") if number == 4 else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert_same(plain, other)


def test_parameters_without_gradients_and_later_groups() -> None:
    plain, other = RandomModule(7), RandomModule(7)
    for model in (plain, other):
        members = list(model.parameters())
        optimizer = torch.optim.AdamW(members[:4], lr=0.01)
        if model is other:
            offloaded(optimizer)
        members[1].requires_grad_(False)
        train(model, optimizer, batches(3))
        optimizer.add_param_group({"params": members[4:], "lr": 0.02})
        members[1].requires_grad_(True)
        train(model, optimizer, batches(3))
    assert_same(plain, other)


def test_budget_that_is_too_small_leaves_the_rest_on_the_device_with_one_warning() -> None:
    plain, other = RandomModule(8), RandomModule(8)
    train(plain, KINDS["adamw"](plain.parameters()), batches(5))
    optimizer = offloaded(KINDS["adamw"](other.parameters()), "cpu:20000")
    with pytest.warns(UserWarning, match="What follows of the optimizer's state stays on the device: 4.00 KiB") as told:
        train(other, optimizer, batches(5))
    assert len(told) == 1
    assert_same(plain, other)
    loaded = offloaded(KINDS["adamw"](other.parameters()), "cpu:8192")
    with pytest.warns(UserWarning, match="stays on the device"):
        loaded.load_state_dict(optimizer.state_dict())
    assert_same_state(loaded.state_dict(), optimizer.state_dict())


def test_disk_that_fails_in_training_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other = RandomModule(9), RandomModule(9)
    data = list(batches(10))
    train(plain, KINDS["adamw"](plain.parameters()), data)
    optimizer = offloaded(KINDS["adamw"](other.parameters()), f"disk:{tmp_path}")
    train(other, optimizer, data[:4])

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwritev", full)
    with pytest.warns(UserWarning, match="stays on the device: What was offloaded to .* cannot be written") as told:
        train(other, optimizer, data[4:])
    assert len(told) == 1 and list(tmp_path.iterdir()) == []
    assert_same(plain, other)


def test_folder_that_cannot_be_used_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    optimizer = KINDS["adamw"](RandomModule(0).parameters())
    with pytest.warns(UserWarning, match="The state of AdamW stays on the device: No file can be made in"):
        assert type(offloaded(optimizer, f"disk:{tmp_path}/none")) is torch.optim.AdamW


class Coupled(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_optimizer_whose_parameters_hang_together_stays_as_it_was() -> None:
    for kind in (torch.optim.LBFGS, Coupled):
        optimizer = kind(RandomModule(0).parameters())
        with pytest.warns(UserWarning, match=f"The state of {kind.__name__} stays .* each parameter by itself"):
            assert type(offloaded(optimizer)) is kind
    with pytest.raises(OffloadFailed, match="Master weights cannot be offloaded for LBFGS"):
        offloaded(torch.optim.LBFGS(RandomModule(0).parameters()), master_weights=True)


def test_parameters_of_another_class_and_differentiated_steps_stay_as_they_were() -> None:
    class Sharded(nn.Parameter):
        """Not of torch."""

    own = torch.optim.SGD([Sharded(torch.ones(4))], lr=0.1)
    with pytest.warns(UserWarning, match="The state of SGD stays on the device: its parameters are of a class"):
        assert type(offloaded(own)) is torch.optim.SGD
    through = torch.optim.SGD([nn.Parameter(torch.ones(4))], lr=0.1, differentiable=True)
    with pytest.warns(UserWarning, match="its steps are to be differentiated"):
        assert type(offloaded(through)) is torch.optim.SGD


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda optimizer: remat.offload_optimizer(optimizer, "gpu"), BudgetError, "Cannot offload to 'gpu'"),
        (lambda optimizer: remat.offload_optimizer(optimizer, device_bytes="2x"), BudgetError, "device_bytes is '2x'"),
        (lambda optimizer: remat.offload_optimizer("adam"), RematError, "an optimizer of torch, not a str"),
        (lambda optimizer: offloaded(offloaded(optimizer)), RematError, "offloaded already"),
        (lambda optimizer: copy.deepcopy(offloaded(optimizer)), RematError, r"copy its state_dict\(\)"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(call: Callable[[Any], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(KINDS["adamw"](RandomModule(0).parameters()))


def test_step_that_fails_keeps_nothing_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.ones(100)) for _ in range(4)]
    optimizer = offloaded(torch.optim.Adam(parameters), device_bytes=3)
    for parameter in parameters:
        parameter.grad = torch.ones(100)
    optimizer.step()
    brought: list[weakref.ref[torch.Tensor]] = []

    def failing(inner: Optimizer) -> None:
        brought.extend(weakref.ref(value) for value in inner.state[inner.param_groups[0]["params"][0]].values())
        raise RuntimeError("out of memory")

    monkeypatch.setattr(optimizer.remat_away, "_update", failing)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert len(optimizer.param_groups[0]["params"]) == 4 and len(brought) == 3
    assert [value for reference in brought if (value := reference()) is not None and value.numel() > 1] == []


def test_benchmark_trains_the_same_in_every_way_of_ours() -> None:
    sizes = "--device cpu --width 32 --depth 2 --heads 2 --vocabulary 16 --length 8 --batch 2 --warmup 1 --steps 2"
    options = bench_optimizer_offload.parse(sizes.split())
    rows = [bench_optimizer_offload.run(way, options) for way in ("resident", "remat", "remat-in-backward")]
    assert len({(row.first_loss, row.last_loss) for row in rows}) == 1
    assert rows[0].first_loss > rows[0].last_loss > 0 and rows[0].tokens_per_s > 0


def test_nothing_is_said_where_all_is_well() -> None:
    model = RandomModule(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, offloaded(KINDS["adamw"](model.parameters())), batches(2))
