"""What plain eager needs for a step that repeats a block many times, without following every block.

In: the graph that Dynamo captured, with its inputs. Out: a `PlainStep`. Where the graph has long runs of alike blocks
(`repeats.py`), two short versions are followed, one with a block more than the other. In each run, in forward and in
backward, memory grows by the same amount from block to block. So the ops of the missing blocks are known from the first
version; with one block added that way it has to be the second.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from remat.pytorch._compat.symbols import has_open_inputs
from remat.pytorch._compat.tensors import storage_address
from remat.pytorch.costs.plain_peak import PlainStep, plain_step
from remat.pytorch.costs.plain_watch import PlainOp
from remat.pytorch.device import storage_bytes
from remat.pytorch.graph.repeats import (
    FIRST,
    LAST,
    BlockRun,
    NotAlike,
    Shortened,
    Stretch,
    find_runs,
    find_stretches,
    shorten,
)
from remat.pytorch.reach import is_used_up

_log = logging.getLogger(__name__)


def plain_step_of(module: GraphModule, inputs: Sequence[Any], device: torch.device) -> PlainStep:
    """As `plain_step`, in less time where blocks repeat."""
    try:
        runs = () if has_open_inputs(module) else find_runs(module)
        if runs:
            return _from_short(module, runs, inputs, device)
    except NotAlike as error:
        _log.info("Every block of the plain step is followed: %s.", error)
    return plain_step(module, inputs, device)


def _from_short(
    module: GraphModule, runs: Sequence[BlockRun], inputs: Sequence[Any], device: torch.device
) -> PlainStep:
    given = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for run in runs:
        _check_own(run, given)
    short, longer = (_followed(shorten(module, runs, first), inputs, device) for first in (FIRST, FIRST + 1))
    regions = _regions(short, len(runs))
    if _lengthened(short, regions, [1] * len(runs), longer.resident_bytes) != longer:
        raise NotAlike("memory does not grow evenly")
    gaps = [len(run.left_out(FIRST)) for run in runs]
    return _lengthened(short, regions, gaps, _resident_bytes(inputs, device))


def _check_own(run: BlockRun, given: dict[Node, Any]) -> None:
    """What happens to the gradient of an input depends on more than its layout."""
    for slot in zip(*run.own, strict=True):
        items = [given[node] for node in slot]
        if len({(item.is_leaf, is_used_up(item)) for item in items if isinstance(item, torch.Tensor)}) > 1:
            raise NotAlike("inputs of blocks are not alike")


def _followed(shortened: Shortened, inputs: Sequence[Any], device: torch.device) -> PlainStep:
    return plain_step(shortened.module, [inputs[place] for place in shortened.places], device)


def _resident_bytes(inputs: Sequence[Any], device: torch.device) -> int:
    storages = {storage_address(item): item for item in inputs if isinstance(item, torch.Tensor)}
    return sum(storage_bytes(item, device) for item in storages.values())


def _regions(short: PlainStep, runs: int) -> list[tuple[int, Stretch]]:
    """Where ops repeat, each with its run: in forward in their order, in backward the other way round."""
    split, least = short.forward_ops, FIRST + LAST - 3
    tokens = [(op.key, op.touched_bytes) for op in short.ops]
    forward = find_stretches(tokens[:split], least)
    backward = find_stretches(tokens[split:], least)
    moved = [replace(stretch, start=stretch.start + split) for stretch in backward]
    if runs == 1:
        return [(0, stretch) for stretch in (*forward, *moved)]
    if (len(forward), len(backward)) != (runs, runs):
        raise NotAlike("other ops repeat, too")
    return [*enumerate(forward), *zip(reversed(range(runs)), moved, strict=True)]


def _lengthened(
    short: PlainStep, regions: Sequence[tuple[int, Stretch]], gaps: Sequence[int], resident_bytes: int
) -> PlainStep:
    """The step with so many blocks more in each run, where so much is resident."""
    more, ops = resident_bytes - short.resident_bytes, list[PlainOp]()
    held, done, forward_ops = more, 0, short.forward_ops
    for run, stretch in regions:
        cut = stretch.start + stretch.count // 2 * stretch.period
        ops += (replace(op, live_bytes=op.live_bytes + more) for op in short.ops[done:cut])
        block = short.ops[cut - stretch.period : cut]
        growth = _growth(short.ops[cut - 2 * stretch.period : cut + stretch.period], stretch.period)
        for ahead in range(1, gaps[run] + 1):
            ops += (replace(op, live_bytes=op.live_bytes + more + growth * ahead) for op in block)
        more, done = more + growth * gaps[run], cut
        if cut < short.forward_ops:
            held, forward_ops = more, forward_ops + gaps[run] * stretch.period
    ops += (replace(op, live_bytes=op.live_bytes + more) for op in short.ops[done:])
    return replace(
        short,
        ops=tuple(ops),
        resident_bytes=resident_bytes,
        held_bytes=short.held_bytes + held,
        forward_ops=forward_ops,
    )


def _growth(ops: Sequence[PlainOp], period: int) -> int:
    """By how much more is in memory from block to block."""
    steps = {after.live_bytes - before.live_bytes for before, after in zip(ops, ops[period:], strict=False)}
    if len(steps) != 1:
        raise NotAlike("memory does not grow evenly")
    return steps.pop()
