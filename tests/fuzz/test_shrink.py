"""A failing case is made smaller for as long as it fails, and prints as Python that makes it again."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.fuzz.modules import Backward, Case, Entry, Form, Returns, Update
from tests.fuzz.parts import Sizes
from tests.fuzz.shrink import reproduction, shrink

CASE = Case(
    5,
    Sizes(12, 8, 48),
    (("linear", 3), ("dropout", 4), ("gather", 5), ("scan", 6)),
    head="mse",
    entry=Entry.LEAF,
    returns=Returns.TWICE,
    backward=Backward.RETAINED,
    form=Form.FUNCTION,
    update=Update.ADAMW,
    micro_batches=2,
)


def test_leaves_only_what_the_failure_needs() -> None:
    def fails(case: Case) -> bool:
        return any(name == "gather" for name, _ in case.blocks) and case.entry is Entry.LEAF

    assert shrink(CASE, fails) == Case(5, Sizes(2, 5, 24), (("gather", 5),), entry=Entry.LEAF)


def test_keeps_a_case_that_cannot_be_made_smaller() -> None:
    assert shrink(CASE, lambda case: False) == CASE


def test_stops_after_as_many_tries_as_it_is_given() -> None:
    tried: list[Case] = []
    shrink(CASE, lambda case: bool(tried.append(case)), tries=4)
    assert len(tried) == 4


def test_reproduction_makes_the_same_case_again() -> None:
    text = reproduction(CASE).replace("print(compare(case).details)", "")
    names: dict[str, object] = {}
    exec(text, names)
    assert names["case"] == CASE
    assert "def gather(" in text
