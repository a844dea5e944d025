"""With which settings Inductor compiles a half."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._inductor import config

from remat.inductor import compile as compiling
from remat.inductor._compat.kernels import NUMBER, PlannedKernel, _numbers_of
from remat.inductor.joining import Rooms
from remat.inductor.partition import Cut, Instead, Uncut


def settings_of(cut: Cut | Instead, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Of both halves of a small step: the size of fused kernels, their order, and whether dropped code is kept."""
    seen: list[tuple[Any, ...]] = []

    def compile_half(module: Any, inputs: Any, **options: Any) -> Any:
        seen.append((config.max_fusion_size, config.reorder_for_peak_memory, config.epilogue_fusion))
        return compiling.leave_half(module, inputs, **options)

    monkeypatch.setattr(compiling, "compile_half", compile_half)

    def decide(uncut: Uncut) -> Cut | Instead:
        return cut

    def backend(module: Any, inputs: Any) -> Any:
        found = compiling.build(module, inputs, decide, torch.device("cpu"), asked)
        assert found is not None
        return found.call

    torch._dynamo.reset()
    weight = torch.ones(4, 4, requires_grad=True)
    torch.compile(lambda x: (x @ weight).tanh().sum(), backend=backend)(torch.ones(2, 4)).backward()
    return seen


def test_code_under_a_plan_is_made_as_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings_of(Cut(frozenset()), {}, monkeypatch)
    assert {item[:2] for item in found} == {(compiling.AS_PREDICTED["max_fusion_size"], False)}
    assert len(found) == 2


def test_where_torch_chooses_its_code_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings_of(Instead.TORCHS_CUT, {}, monkeypatch)
    assert {item[:2] for item in found} == {(config.max_fusion_size, config.reorder_for_peak_memory)}


def test_what_the_user_asks_for_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings_of(Cut(frozenset()), {"epilogue_fusion": not config.epilogue_fusion}, monkeypatch)
    assert {item[2] for item in found} == {not config.epilogue_fusion}


def test_matmuls_are_padded_as_before_whatever_other_processes_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another graph would come of it, for which no choice was made."""
    from torch._inductor.fx_passes import pad_mm

    shared: dict[str, bool] = {}

    def keep(key: str, value: bool) -> None:
        shared[key] = value

    monkeypatch.setattr(pad_mm, "get_cached_should_pad", shared.get)
    monkeypatch.setattr(pad_mm, "set_cached_should_pad", keep)
    with compiling.compiling_both_halves():
        assert pad_mm.get_cached_should_pad("matmul of this test") is None
        pad_mm.set_cached_should_pad("matmul of this test", value=True)
    assert shared == {"matmul of this test": True}
    for elsewhere in ({}, {"matmul of this test": False}):
        shared.clear()
        shared.update(elsewhere)
        with compiling.compiling_both_halves():
            assert pad_mm.get_cached_should_pad("matmul of this test") is True


class Refusing:
    """Room that is never there; notes who asked."""

    most_bytes = 0

    def __init__(self) -> None:
        self.asked: list[PlannedKernel] = []

    def for_one(self, one: PlannedKernel, other: PlannedKernel) -> bool:
        self.asked += [one, other]
        return False

    def to_hold(self, last: PlannedKernel, next_: PlannedKernel, size_bytes: int) -> bool:
        return False


@pytest.mark.parametrize("refuses", [False, True])
def test_kernels_become_one_only_where_there_is_room(refuses: bool) -> None:
    room, sources, numbers = Refusing(), list[str](), list[int]()

    def decide(uncut: Uncut) -> Cut:
        numbers.append(len(uncut.joint.nodes))
        return Cut(frozenset(), rooms=Rooms(room, room) if refuses else None)  # type: ignore[arg-type]

    def backend(module: Any, inputs: Any) -> Any:
        found = compiling.build(module, inputs, decide, torch.device("cpu"), {"fx_graph_cache": False})
        assert found is not None
        sources.append(found.forward.source)
        return found.call

    torch._dynamo.reset()
    weight = torch.ones(64, 64, requires_grad=True)
    product = torch.compile(lambda x: ((y := x @ weight).sin() @ weight + y.cos() @ weight).sum(), backend=backend)
    product(torch.ones(64, 64)).backward()
    made = sources[0].count("= async_compile.")
    assert made == (2 if not refuses else 3), sources[0]
    if refuses:
        assert room.asked and all(kernel.nodes and kernel.made_bytes for kernel in room.asked)
        assert max(max(kernel.nodes) for kernel in room.asked) < numbers[0]


@pytest.mark.parametrize(("most", "held"), [(2**40, 2**20), (2**26, 2**16)])
def test_what_is_held_for_later_is_small_beside_all_that_code_may_need(
    most: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def hold(size_bytes: int, *_: Any) -> Any:
        asked.append(size_bytes)
        return nullcontext()

    monkeypatch.setattr(compiling, "holding_freed_buffers_up_to", hold)
    room = Refusing()
    room.most_bytes = most
    with compiling.compiling_as_predicted("cuda", room):  # type: ignore[arg-type]
        pass
    assert asked == [held]


class Item:
    """Of Inductor's code: computed for one node of a graph, with others on the way."""

    def __init__(self, made_for: Any, on_the_way: list[Any]) -> None:
        self.get_origin_node = lambda: made_for
        self.get_origins = lambda: [*on_the_way, *([made_for] if made_for is not None else [])]


def test_a_kernel_stands_where_what_it_is_made_for_does() -> None:
    """Not where something was predicted that it computes on the way, which may be much later."""
    made_for, later, unknown = (SimpleNamespace(meta=meta) for meta in ({NUMBER: 3}, {NUMBER: 9}, {}))
    assert _numbers_of(Item(made_for, [later, unknown])) == {3}
    assert _numbers_of(Item(None, [later, unknown])) == {9}
    assert _numbers_of(Item(unknown, [later])) == {9}
    assert _numbers_of(None) == set()
