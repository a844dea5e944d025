"""What an allocator's counters make of the storages that were seen, played without a device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from remat.core.results.profile import BEFORE
from remat.pytorch.measure.ledger import CudaLedger, SeenStorage, Span, levels


class PlayedLedger(CudaLedger):
    """Counters move as the test says instead of as a device does."""

    def __init__(self, resting: int) -> None:
        super().__init__(torch.device("cuda"))
        self.current = self.peak = self.allocated = resting
        self.freed = 0

    def start(self) -> None:
        self._at_start = self._read()

    def stop(self) -> None:
        self._begins.append(self._read())

    def take(self, size: int) -> None:
        self.current += size
        self.allocated += size
        self.peak = max(self.peak, self.current)

    def give(self, size: int) -> None:
        self.current -= size
        self.freed += size

    def _read(self):
        peak, self.peak = self.peak, self.current
        return type(self._at_start)(self.current, peak, self.allocated, self.freed, 4096)


def test_counters_beyond_the_storages_are_other_and_workspace() -> None:
    ledger = PlayedLedger(resting=1000)
    ledger.start()
    ledger.begin()
    ledger.take(512)  # the result
    ledger.take(300)  # workspace
    ledger.give(300)
    ledger.end()
    ledger.begin()
    ledger.take(512)
    ledger.take(64)  # a library keeps this
    ledger.end()
    ledger.give(512)
    ledger.begin()
    ledger.end()
    ledger.stop()
    seen = [SeenStorage(600, 0, BEFORE, False), SeenStorage(512, 0, 0, True, last_op=1), SeenStorage(512, 0, 1, True)]
    found = ledger.account(seen, 3)
    assert found.start_bytes == 1000
    assert found.live_bytes == [1512, 2088, 1576]
    assert found.workspace_bytes == [300, 0, 0]
    assert found.allocated_bytes == [812, 576, 0]
    assert found.freed_bytes == [300, 512, 0]
    assert found.others == [Span(400, BEFORE, 3), Span(64, 1, 3)]
    assert found.reserved_bytes == 4096
    spans = [span for span in found.spans if span is not None]
    assert levels([*spans, *found.others], 3) == found.live_bytes


def test_storage_dropped_inside_an_op_counts_until_the_op_is_over() -> None:
    ledger = PlayedLedger(resting=512)
    ledger.start()
    ledger.begin()
    ledger.give(512)
    ledger.take(1024)
    ledger.end()
    ledger.stop()
    seen = [SeenStorage(512, 0, BEFORE, False, last_op=0, died_inside=True), SeenStorage(1024, 0, 0, True)]
    assert ledger.account(seen, 1).live_bytes == [1536]


def test_storage_met_as_an_argument_was_made_just_before_if_as_much_was() -> None:
    ledger = PlayedLedger(resting=512)
    ledger.start()
    ledger.take(1024)
    ledger.begin()
    ledger.end()
    ledger.begin()
    ledger.end()
    ledger.stop()
    seen = [SeenStorage(1024, 0, 0, False), SeenStorage(512, 0, 1, False)]
    assert ledger.account(seen, 2).spans == [Span(1024, 0, 2), Span(512, BEFORE, 2)]


def test_other_memory_that_shrinks_goes_from_the_top() -> None:
    ledger = PlayedLedger(resting=100)
    ledger.start()
    for change in (50, -20, -40):
        ledger.begin()
        if change > 0:
            ledger.take(change)
        else:
            ledger.give(-change)
        ledger.end()
    ledger.stop()
    found = ledger.account([], 3)
    assert found.live_bytes == [150, 130, 90]
    assert levels(found.others, 3) == [150, 130, 90]
