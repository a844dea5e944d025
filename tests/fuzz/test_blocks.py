"""Blocks keep shapes, cases are the same whenever they are made, and every choice is made by some seed."""

from __future__ import annotations

from dataclasses import fields
from random import Random

import pytest

torch = pytest.importorskip("torch")

from tests.fuzz.blocks import BLOCKS
from tests.fuzz.modules import Backward, Entry, Form, Returns, make_case
from tests.fuzz.parts import Layout, Sizes
from tests.fuzz.trainer import differences, same_bits


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", BLOCKS)
def test_block_keeps_the_shape_of_what_passes_through(name: str) -> None:
    kind, sizes = BLOCKS[name], Sizes(2, 5, 24)
    layouts = (Layout.SEQUENCE, Layout.IMAGE) if kind.layout is Layout.ANY else (kind.layout,)
    for layout in layouts:
        for seed in range(8):
            x = torch.randn(sizes.shape(layout))
            assert kind.make(Random(seed), sizes)(x).shape == x.shape


def test_case_is_the_same_each_time_it_is_made() -> None:
    for seed in range(20):
        case = make_case(seed)
        assert case == make_case(seed)
        first, second = case.build().state_dict(), case.build().state_dict()
        assert differences(first, second) == []
        assert all(map(same_bits, case.inputs(3), case.inputs(3)))


def test_every_choice_is_made_within_a_thousand_cases() -> None:
    cases = [make_case(seed) for seed in range(1000)]
    assert {name for case in cases for name, _ in case.blocks} == set(BLOCKS)
    for name, kind in {"entry": Entry, "returns": Returns, "backward": Backward, "form": Form}.items():
        assert {getattr(case, name) for case in cases} == set(kind)
    assert {0, 1, 8} <= {case.sizes.batch for case in cases}


def test_description_names_every_block_and_every_odd_choice() -> None:
    case = make_case(103)
    text = case.describe()
    assert all(name in text for name, _ in case.blocks)
    assert len(fields(case)) > 10 and case.head in text and case.backward.value in text


def test_bits_differ_where_only_the_sign_of_zero_does_and_not_between_nans() -> None:
    assert not same_bits(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert same_bits(torch.tensor(float("nan")), torch.tensor(-float("nan")))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
