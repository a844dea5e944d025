"""With which settings Inductor compiles a half."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._inductor import config

from remat.inductor import compile as compiling
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
