from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from remat.pytorch.rng import remember, replay


def test_replay_draws_the_same_numbers_again() -> None:
    state = remember("cpu")
    first = torch.rand(5)
    torch.rand(3)
    assert torch.equal(replay(state, torch.rand, 5), first)


def test_replay_leaves_the_generator_as_it_found_it() -> None:
    state = remember("cpu")
    torch.rand(3)
    before = torch.get_rng_state()
    replay(state, torch.rand, 5)
    assert torch.equal(torch.get_rng_state(), before)


def test_replay_that_fails_leaves_the_generator_as_it_found_it() -> None:
    state = remember("cpu")
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        replay(state, lambda: torch.rand(5) + 1 / 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_can_be_replayed_many_times() -> None:
    state = remember("cpu")
    draws = [replay(state, torch.rand, 4) for _ in range(3)]
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[1], draws[2])
