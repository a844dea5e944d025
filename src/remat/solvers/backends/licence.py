"""What a library says when its licence does not allow a program of this size."""

from __future__ import annotations


class TooLarge(Exception):
    """The licence of a library refuses a program of this size; caught where another library takes over."""
