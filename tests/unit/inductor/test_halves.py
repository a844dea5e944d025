"""Code of Inductor's that is called as eager's would be; functions stand for it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from remat.inductor import halves


def compiled(code: Any, monkeypatch: pytest.MonkeyPatch, *, donated: tuple[int, ...] = (), outputs: int = 0) -> Any:
    monkeypatch.setattr(halves, "take_donated", lambda: list(donated))
    monkeypatch.setattr(halves, "forward_output_count", lambda: outputs)
    wrap = halves.as_eager_runs_it(lambda module, inputs, **options: code)
    return wrap(None, (), is_backward=bool(donated))


def test_what_is_returned_twice_becomes_two_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    run = compiled(lambda arguments: (arguments[0], arguments[0], arguments[0]), monkeypatch, outputs=2)
    x = torch.ones(3)
    for _ in range(2):
        first, second, saved = run([x])
        assert first is x and saved is x, "what is saved for backward stays as it is"
        assert second is not x and second.data_ptr() == x.data_ptr()


def test_results_that_differ_are_handed_on_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    results = (torch.ones(1), 3, torch.ones(1))
    assert compiled(lambda arguments: results, monkeypatch, outputs=3)([]) is results


def test_a_kept_backward_writes_into_copies_of_the_same_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(32.0).as_strided((4, 2), (8, 4))
    strides: list[Any] = []

    def code(arguments: list[Any]) -> Any:
        strides.append(arguments[0].stride())
        arguments[0].zero_()
        return arguments[0]

    run = compiled(code, monkeypatch, donated=(0,))
    monkeypatch.setattr(halves, "keeps_graph", lambda: True)
    with pytest.warns(UserWarning, match="it gets copies of that"):
        assert not run([x]).any()
    assert x.any() and strides == [(8, 4)]
    monkeypatch.setattr(halves, "keeps_graph", lambda: False)
    run([x])
    assert not x.any()
