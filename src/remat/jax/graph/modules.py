"""Flax NNX modules among the arguments: objects whose state a call may change.

In: a call's arguments. Out: the same with `ObjectParts` for each such object, whose arrays are leaves like any others,
and back. What a call changes (counts of random keys, statistics of batches) would stay in the copies that jax makes: it
is told, and written into the caller's objects afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from remat.errors import CaptureError


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, slots=True)
class ObjectParts:
    """An object as what it is made of."""

    graph: Any
    state: Any

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        return (self.state,), self.graph

    @staticmethod
    def tree_unflatten(graph: Any, children: tuple[Any]) -> ObjectParts:
        return ObjectParts(graph, children[0])


def held(arguments: Any) -> Any:
    """The arguments with their objects taken apart."""
    return jax.tree.map(lambda item: _held(item) if _is_object(item) else item, arguments, is_leaf=_is_object)


def rebuilt(arguments: Any) -> tuple[Any, list[Any]]:
    """Arguments with objects again, which are copies, and these objects."""
    copies: list[Any] = []

    def build(item: Any) -> Any:
        if not isinstance(item, ObjectParts):
            return item
        from flax import nnx

        copies.append(nnx.merge(item.graph, item.state, copy=True))
        return copies[-1]

    return jax.tree.map(build, arguments, is_leaf=_is_held), copies


def changes(arguments: Any, copies: Sequence[Any]) -> dict[int, Any]:
    """What the copies have that differs from the arguments that they were built from, by its place in all of them."""
    before = _all_held(arguments)
    after = list(map(_held, copies))
    if any(old.graph != new.graph for old, new in zip(before, after, strict=True)):
        raise CaptureError(
            "The function adds to a module or takes from it while it runs; run it once before, or return what it adds."
        )
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return {place: new for place, (old, new) in enumerate(pairs) if new is not old}


def write(arguments: Any, changed: Mapping[int, Any]) -> None:
    """Give the caller's objects what a call changed."""
    first = 0
    for item in filter(_is_object, jax.tree.leaves(arguments, is_leaf=_is_object)) if changed else ():
        from flax import nnx

        leaves, tree = jax.tree.flatten(_held(item).state)
        places = range(first, first + len(leaves))
        first += len(leaves)
        if not changed.keys().isdisjoint(places):
            nnx.update(
                item, jax.tree.unflatten(tree, [changed.get(place, leaves[place - places[0]]) for place in places])
            )


def parameters(argument: Any) -> Any:
    """What is differentiated of an argument: of an object, its parameters."""

    def of(item: Any) -> Any:
        if not isinstance(item, ObjectParts):
            return item
        from flax import nnx

        return nnx.filter_state(item.state, nnx.Param)

    return jax.tree.map(of, argument, is_leaf=_is_held)


def _held(item: Any) -> ObjectParts:
    from flax import nnx

    return ObjectParts(*nnx.split(item))


def _all_held(arguments: Any) -> list[ObjectParts]:
    return [item for item in jax.tree.leaves(arguments, is_leaf=_is_held) if isinstance(item, ObjectParts)]


def _is_held(item: Any) -> bool:
    return isinstance(item, ObjectParts)


def _is_object(item: Any) -> bool:
    """Who has an object of flax has imported it."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(item, nnx.Pytree)
