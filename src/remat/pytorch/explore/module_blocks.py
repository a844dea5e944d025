"""The repeated blocks of a model, and the model with `torch.utils.checkpoint` around each of them.

A block is a member of a `ModuleList` or `Sequential` whose members are all of one class and no such lists themselves:
the layers of a transformer, the residual blocks of every stage of a ResNet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def repeated_blocks(model: Any) -> tuple[str, ...]:
    """Names of the blocks, as `layers.3`; none for a function."""
    return tuple(_find(model, "")) if isinstance(model, nn.Module) else ()


def checkpoint_blocks(model: nn.Module) -> list[nn.Module]:
    """Checkpoint the blocks of a model from now on; gives the blocks."""
    blocks = [model.get_submodule(name) for name in repeated_blocks(model)]
    for block in blocks:
        block.forward = _again(block.forward)
    return blocks


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[nn.Module]:
    """The model itself, whose blocks are checkpointed while this lasts."""
    blocks = [model.get_submodule(name) for name in repeated_blocks(model)]
    before = {block: block.__dict__.get("forward") for block in blocks}
    checkpoint_blocks(model)
    try:
        yield model
    finally:
        for block, forward in before.items():
            if forward is None:
                del block.forward
            else:
                block.forward = forward


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    return partial(checkpoint, forward, use_reentrant=False)


def _find(module: nn.Module, name: str) -> Iterator[str]:
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if not _is_block_list(child) or any(map(_is_block_list, child.children())) or _has_stages(child):
            yield from _find(child, path)
        else:
            yield from (f"{path}.{member}" for member, _ in child.named_children())


def _has_stages(blocks: nn.Module) -> bool:
    """Whether its members grow from one to the next, each with blocks of its own: stages of a hierarchical network."""
    sizes = [sum(parameter.numel() for parameter in member.parameters()) for member in blocks.children()]
    return len(set(sizes)) == len(sizes) and all(any(map(_is_block_list, item.modules())) for item in blocks.children())


def _is_block_list(module: nn.Module) -> bool:
    members = list(module.children())
    one_class = len({type(member) for member in members}) == 1
    # Layers without parameters, or of one operator, are not what people checkpoint.
    large = all(any(True for _ in member.children()) for member in members)
    return isinstance(module, (nn.ModuleList, nn.Sequential)) and len(members) > 1 and one_class and large
