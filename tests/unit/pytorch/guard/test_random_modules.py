"""Random modules with an out-of-memory error in every step: the bits of a run without any."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable

import pytest
import torch
from tests.support.memory_faults import OutOfMemoryAt
from tests.unit.pytorch.guard.test_guarded import assert_same, state_of
from tests.unit.pytorch.random_module import WIDTH, RandomModule
from torch import nn

import remat


def step_of(model: nn.Module) -> Callable[[torch.Tensor], None]:
    def step(x: torch.Tensor) -> None:
        model(x).backward()

    return step


@pytest.mark.parametrize("seed", range(30))
def test_random_module_that_fails_in_every_step_has_the_bits_of_one_that_never_does(seed: int) -> None:
    choose = random.Random(seed)
    plain = RandomModule(seed, depth=choose.randint(2, 10))
    model = copy.deepcopy(plain)
    torch.manual_seed(seed)
    batches = [torch.randn(32, WIDTH) for _ in range(4)]
    step = remat.guarded(step_of(model)) if seed % 2 else step_of(remat.guarded(model))
    torch.manual_seed(5)
    for x in batches:
        step_of(plain)(x)
    torch.manual_seed(5)
    faults = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x in batches:
            with OutOfMemoryAt(choose.randint(1, 40)) as mode:
                step(x)
            faults += mode.raised
    assert faults > 0
    assert_same(state_of(model), state_of(plain))
