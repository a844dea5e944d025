from __future__ import annotations

import pytest

from remat.core import format_bytes, parse_budget
from remat.errors import BudgetError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1000, 1000),
        ("8GiB", 8 * 2**30),
        ("500MB", 500_000_000),
        ("1.5 kib", 1536),
        ("2e3", 2000),
        ("80%", 800),
        ("0.5x", 50),
    ],
)
def test_budget_in_bytes(text: str | int, expected: int) -> None:
    assert parse_budget(text).resolve(plain_peak_bytes=100, device_bytes=1000) == expected


@pytest.mark.parametrize("text", ["", "abc", "5 parsecs", "-3", "0", "nan", "inf", "1e999", True, None, "8GiB8"])
def test_refuses_what_is_no_budget(text: object) -> None:
    with pytest.raises(BudgetError, match="write bytes|Cannot read"):
        parse_budget(text)  # type: ignore[arg-type]


def test_formats_bytes_with_a_unit() -> None:
    assert [format_bytes(count) for count in (12, 1536, 3 * 2**40)] == ["12 B", "1.50 KiB", "3.00 TiB"]
