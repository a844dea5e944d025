"""Storages are followed to their death, and not kept from it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from remat.pytorch.living_storages import LivingStorages


def test_views_are_one_storage_and_death_is_told_once() -> None:
    died: list[str] = []
    living = LivingStorages[str](died.append)
    tensor = torch.zeros(4)
    view = tensor[1:]
    living.add(tensor, "first")
    assert view in living
    assert living.get(view) == "first"
    del tensor
    assert died == []
    del view
    assert died == ["first"]
    assert list(living.items()) == []


def test_what_is_added_again_is_remembered_as_the_latter() -> None:
    died: list[int] = []
    living = LivingStorages[int](died.append)
    tensor = torch.zeros(4)
    living.add(tensor, 1)
    living.add(tensor, 2)
    assert living.get(tensor) == 2
    del tensor
    assert died == [2]


def test_storage_that_was_never_added_is_not_known() -> None:
    living = LivingStorages[int]()
    assert torch.zeros(1) not in living
    assert living.get(torch.zeros(1)) is None
