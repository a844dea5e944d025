"""Time that runs out by a given clock, and the best answer of a search until then."""

from __future__ import annotations

import itertools

from remat.core.search.incumbent import Incumbent
from remat.core.search.limits import Countdown, Limits


class Lowest(Incumbent[str, int]):
    """The lowest number offered; told are its sources."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits, "nothing", 100, 0)
        self.told: list[tuple[int, int, str]] = []

    @property
    def is_closed(self) -> bool:
        return self.value - self.bound <= self.limits.gap * self.value

    def tell(self, source: str) -> None:
        self.told.append((self.value, self.bound, source))


def test_time_runs_from_when_the_countdown_is_made() -> None:
    countdown = Countdown(Limits(3.0, clock=itertools.count(10.0).__next__))
    assert countdown.elapsed_s() == 1.0
    assert countdown.left_s() == 1.0
    assert countdown.left_s() == 0.0
    assert not countdown.is_over_by(1.0)
    assert countdown.left_s() == 0.0
    assert countdown.is_over_by(1.0)


def test_only_a_better_answer_is_kept_and_told() -> None:
    found = Lowest(Limits(60.0))
    assert found.keep("five", 5, "first")
    assert not found.keep("five again", 5, "second")
    found.raise_bound(3, "proof")
    found.raise_bound(2, "weaker proof")
    assert (found.best, found.value, found.bound) == ("five", 5, 3)
    assert found.told == [(5, 0, "first"), (5, 3, "proof")]


def test_search_stops_within_the_gap_or_at_the_time_limit() -> None:
    assert Lowest(Limits(0.0)).stop()
    found = Lowest(Limits(60.0, gap=0.5))
    assert not found.stop()
    found.raise_bound(50, "proof")
    assert found.stop()
