"""What a user writes as a budget, in bytes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum, StrEnum

from remat.errors import BudgetError

_UNITS = {"": 1, "B": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_UNITS |= {f"{prefix}B": _UNITS[prefix] for prefix in "KMGT"}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", start=1)}
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-zA-Z%]*)\s*", re.IGNORECASE)
_MANY_TIMES = 100
"""Below it a number with a fraction is more likely meant as a share of the plain peak than as bytes."""
_HELP = 'write bytes (1073741824), "8GiB", "500MB", "80%" of the device, or "0.6x" of the plain peak'


class BudgetUnit(Enum):
    BYTES = "bytes"
    DEVICE_FRACTION = "fraction of the device's memory"
    PLAIN_FRACTION = "fraction of the plain step's peak"


class BudgetScope(StrEnum):
    """What of a step has to stay within its budget."""

    LIVE = "live"
    """The bytes alive at one time."""
    ARENA = "arena"
    """The height of the arena that holds them, each at an address of its own, and what is resident."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A parsed budget; fractions are resolved once the device or the plain peak is known."""

    amount: float
    unit: BudgetUnit

    def resolve(self, *, plain_peak_bytes: int, device_bytes: int) -> int:
        if self.unit is BudgetUnit.BYTES:
            return int(self.amount)
        return int(self.amount * (plain_peak_bytes if self.unit is BudgetUnit.PLAIN_FRACTION else device_bytes))


def parse_budget(text: str | float | Budget) -> Budget:
    """`20_000_000`, "8GiB", "500MB", "80%" or "0.6x"."""
    if isinstance(text, Budget):
        return text
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return _checked(float(text), BudgetUnit.BYTES, text)
    match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise BudgetError(f"Cannot read the budget {text!r}; {_HELP}.")
    amount, unit = float(match[1]), match[2].upper()
    if unit == "%":
        return _checked(amount / 100, BudgetUnit.DEVICE_FRACTION, text)
    if unit == "X":
        return _checked(amount, BudgetUnit.PLAIN_FRACTION, text)
    if unit not in _UNITS:
        raise BudgetError(f"Cannot read the unit {match[2]!r} of the budget {text!r}; {_HELP}.")
    return _checked(amount * _UNITS[unit], BudgetUnit.BYTES, text)


def parse_budget_scope(text: str) -> BudgetScope:
    """ "live" or "arena"."""
    if text not in tuple(BudgetScope):
        raise BudgetError(f"A budget cannot count {text!r}; it counts {' or '.join(map(repr, map(str, BudgetScope)))}.")
    return BudgetScope(text)


def format_bytes(count: float) -> str:
    """`1610612736` as "1.50 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def _checked(amount: float, unit: BudgetUnit, text: object) -> Budget:
    if unit is BudgetUnit.BYTES and 0 < amount < _MANY_TIMES and not amount.is_integer():
        raise BudgetError(f'The budget {text!r} is a part of a byte; did you mean "{amount:g}x" of the plain peak?')
    if not (math.isfinite(amount) and amount > 0):
        raise BudgetError(f"The budget {text!r} is not a positive, finite amount; {_HELP}.")
    return Budget(amount, unit)
