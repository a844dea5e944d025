"""Nested arguments and results, which torch itself keeps private."""

from __future__ import annotations

from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["tree_leaves", "tree_map"]
