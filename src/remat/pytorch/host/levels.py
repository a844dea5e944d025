"""Where what is offloaded goes: what a user writes, and the store that it opens.

In: "cpu", "cpu:64GiB", "disk:PATH" or "disk:PATH:200GiB". Out: a `Level`, and from that a `Store` for one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from remat.core.budget import BudgetUnit, parse_budget
from remat.errors import BudgetError

if TYPE_CHECKING:
    import torch

    from remat.pytorch.host.store import LastingStore

_HELP = 'write "cpu", "cpu:64GiB", "disk:/a/folder" or "disk:/a/folder:200GiB"'


@dataclass(frozen=True, slots=True)
class Level:
    """Host memory, or a folder whose disk is used; without a budget, as much as the system gives."""

    folder: Path | None
    budget_bytes: int | None

    def open(self, device: torch.device) -> LastingStore:
        if self.folder is None:
            from remat.pytorch.host.store import HostStore

            return HostStore(device, self.budget_bytes)
        from remat.pytorch.host.disk_store import DiskStore

        return DiskStore(device, self.folder, self.budget_bytes)


def parse_level(text: str | Level) -> Level:
    """As a user writes it."""
    if isinstance(text, Level):
        return text
    kind, _, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
    if kind == "cpu":
        return Level(None, _bytes(rest, text) if rest else None)
    if kind != "disk" or not rest:
        raise BudgetError(f"Cannot offload to {text!r}; {_HELP}.")
    folder, _, amount = rest.rpartition(":")
    # A colon may be part of a folder's name; what follows the last one is an amount if it begins like one.
    if folder and amount[:1].isdigit():
        return Level(Path(folder), _bytes(amount, text))
    return Level(Path(rest), None)


def _bytes(amount: str, text: object) -> int:
    if amount.strip() == "0":
        return 0
    budget = parse_budget(amount)
    if budget.unit is not BudgetUnit.BYTES:
        raise BudgetError(f"Cannot offload to {text!r}: its amount is not in bytes; {_HELP}.")
    return int(budget.amount)
