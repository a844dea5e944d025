"""Steps with thousands of results compile as those with a few do."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
# torch 2.11 writes no code for what it returns.
subclass_codegen = pytest.importorskip("torch._functorch._aot_autograd.subclass_codegen")

from torch import Tensor, nn

import remat
from remat.pytorch._compat import tracing
from remat.pytorch._compat.tracing import many_results_compiled

COUNT = 4000


class Counting(nn.Module):
    """Writes to some buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name in ("one", "two", "three"):
            self.register_buffer(name, torch.zeros(4))

    def forward(self, rows: Tensor) -> Tensor:
        for buffer in self.buffers():
            buffer.add_(rows.detach().mean(0))
        return torch.tanh(self.layer(rows)).sum()


def test_results_without_gradients_are_listed_however_many_there_are() -> None:
    places = range(0, 2 * COUNT, 2)
    terms = (f"([raw_returns[{i}]] if isinstance(raw_returns[{i}], Tensor) else [])" for i in places)
    source = f"def listed(raw_returns):\n    non_diff = {' + '.join(terms)}\n    return non_diff"
    given = (source, {"Tensor": Tensor}, "listed", "a test")
    with many_results_compiled():
        listed = subclass_codegen._compile_and_exec_source(*given)
    results = [torch.full((), number) if number % 3 else number for number in range(2 * COUNT)]
    assert list(map(int, listed(results))) == [number for number in places if number % 3]


def test_torch_lists_such_results_as_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    one_list = tracing._one_list

    def noted(match: Any) -> str:
        found.append(one_list(match))
        return found[-1]

    monkeypatch.setattr(tracing, "_one_list", noted)
    torch.manual_seed(0)
    plain, rows = Counting(), torch.randn(3, 4)
    planned = Counting()
    planned.load_state_dict(plain.state_dict())
    step = remat.optimize(planned, budget="1.0x")
    for model, call in ((plain, plain), (planned, step)):
        call(rows).backward()
        assert model.layer.weight.grad is not None
    assert [text.count("raw_returns[i]") for text in found] == [2]
    assert all(torch.equal(one, other) for one, other in zip(plain.buffers(), planned.buffers(), strict=True))
    assert torch.equal(plain.layer.weight.grad, planned.layer.weight.grad)
