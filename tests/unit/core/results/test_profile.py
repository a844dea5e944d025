"""What a profile says of its step: the peak, what it is made of, who waits for backward, modules."""

from __future__ import annotations

from tests.unit.core.profiles import SIZE, WORKSPACE, step_profile

from remat.core.results.profile import MemoryClass


def test_classes_add_up_to_the_total_at_every_op() -> None:
    profile = step_profile(5)
    lines = profile.bytes_by_class().values()
    assert tuple(map(sum, zip(*lines, strict=True))) == profile.during_bytes


def test_breakdown_adds_up_to_the_peak_largest_first() -> None:
    profile = step_profile(5)
    parts = profile.breakdown()
    assert sum(parts.values()) == profile.peak_bytes == 11 * SIZE + WORKSPACE
    assert list(parts.values()) == sorted(parts.values(), reverse=True)
    assert parts[MemoryClass.WORKSPACE] == WORKSPACE


def test_idle_time_is_what_lies_between_forward_and_backward() -> None:
    profile = step_profile(2)
    first = next(item for item in profile.storages if item.kind is MemoryClass.ACTIVATION)
    assert (first.created, first.first_backward_use) == (1, 6)
    assert profile.idle_ns(first) == 4 * 5.0


def test_modules_share_out_every_byte_at_the_peak_but_workspace() -> None:
    profile = step_profile(3)
    rows = profile.modules()
    assert sum(row.at_peak_bytes for row in rows) == profile.peak_bytes - WORKSPACE
    assert sum(row.op_count for row in rows) == len(profile.ops)
    assert {row.parameter_bytes for row in rows} == {SIZE}
    assert {row.activation_bytes for row in rows} == {SIZE}
