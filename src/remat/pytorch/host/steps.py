"""What a lowered program calls where its schedule moves a value; see `core/copies.py` and `store.py`.

Functions of their own, so that FX can write them into code; each is one op of a schedule, or the first read of a value
that came back.
"""

from __future__ import annotations

import torch

from remat.pytorch.host.store import Store, Ticket


def begin_out(store: Store, tensor: torch.Tensor) -> Ticket:
    return store.copy_out(tensor)


def be_gone(ticket: Ticket, tensor: torch.Tensor) -> None:
    """`tensor` is only held until here: what is computed later may use its memory."""
    ticket.wait_out()


def begin_back(store: Store, ticket: Ticket) -> torch.Tensor:
    return store.copy_back(ticket)


def arrive(ticket: Ticket) -> None:
    """What is computed from here on may read what came back."""
    ticket.wait_back()
