"""Kernels of compiled code on made-up tensors, with stand-ins for kernels that only a GPU could run."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.unit.inductor.kernels.test_text import LOOK_UP, POINTWISE

from remat.core.results.profile import Phase
from remat.inductor.dry_run.compiled import Compiled
from remat.inductor.kernels.clock import SeenCalls, time_kernels

CPU = torch.device("cpu")
GELU, LOOKS_UP = "triton_poi_fused_gelu_0", "triton_poi_fused_embedding_1"


class Kernel:
    def __init__(self, error: Exception | None = None) -> None:
        self.got: list[tuple[Any, ...]] = []
        self.error = error

    def __call__(self, args: Any) -> None:
        self.got.append(tuple(args))
        if self.error is not None:
            raise self.error


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kernel]:
    found = {GELU: Kernel(), LOOKS_UP: Kernel()}
    monkeypatch.setattr("remat.inductor.kernels.clock.loaded_code", lambda key: found if key == "key" else {})
    monkeypatch.setattr("remat.inductor.kernels.clock.run_kernel", lambda kernel, args: kernel(args))
    return found


def compiled(source: str = POINTWISE + LOOK_UP) -> Compiled:
    return Compiled(source, (), (), (), {}, is_backward=False, code_key="key")


def seen(*names: str) -> SeenCalls:
    calls = SeenCalls()
    for name in names:
        calls.note(Phase.FORWARD, name, (torch.ones(8, 16), torch.ones(8, 16), torch.ones(4, 2).t(), 128))
    return calls


def test_a_kernel_runs_on_zeros_of_the_same_looks(kernels: dict[str, Kernel]) -> None:
    found = time_kernels(compiled(), seen(GELU, GELU, GELU).of(Phase.FORWARD), CPU, most_bytes=2**20)
    (timed,) = found.kernels
    assert timed.times == 3 and timed.time_ns > 0 and timed.text.nodes == ("erf", "mul")
    assert timed.moved_bytes == 4 * (2 * 128 + 2 * 128 + 8), "two arguments are read and written"
    first, second, third, number = kernels[GELU].got[0]
    assert (third.shape, third.stride(), number) == ((2, 4), (1, 2), 128)
    assert not first.any() and not second.any()
    assert len(kernels[GELU].got) > 1, "the first run tunes it and is not timed"


def test_what_goes_by_data_is_left_alone(kernels: dict[str, Kernel]) -> None:
    found = time_kernels(compiled(), seen(GELU, LOOKS_UP).of(Phase.FORWARD), CPU, most_bytes=2**20)
    assert len(found.kernels) == 1 and [call.name for call in found.untimed] == [LOOKS_UP]
    assert not kernels[LOOKS_UP].got


@pytest.mark.parametrize("reason", ["memory", "refused", "not loaded"])
def test_what_cannot_run_is_told(kernels: dict[str, Kernel], reason: str) -> None:
    if reason == "refused":
        kernels[GELU].error = RuntimeError("misaligned")
    if reason == "not loaded":
        del kernels[GELU]
    most = 100 if reason == "memory" else 2**20
    found = time_kernels(compiled(), seen(GELU).of(Phase.FORWARD), CPU, most)
    assert not found.kernels and [call.name for call in found.untimed] == [GELU]


def test_calls_of_the_two_halves_are_apart_and_hold_no_tensor() -> None:
    calls = SeenCalls()
    tensor = torch.ones(3)
    calls.note(Phase.FORWARD, GELU, (tensor,))
    calls.note(Phase.BACKWARD, GELU, (tensor,))
    calls.note(Phase.BACKWARD, "extern_kernels.mm", (tensor,))
    assert len(calls.of(Phase.FORWARD)) == len(calls.of(Phase.BACKWARD)) == 1
    assert not any(isinstance(item, torch.Tensor) for item in calls.of(Phase.FORWARD)[0].args)
