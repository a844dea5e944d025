"""The device of a step: its name, its size, how it rounds, and whose generators it has.

In: a `torch.device`. Out: what depends on its kind alone. Clocks are in `measure/clocks.py`.
"""

from __future__ import annotations

import os

import torch

from remat.core.memory_rules import MemoryRules, memory_rules


def rules_of(device: torch.device) -> MemoryRules:
    return memory_rules(device.type)


def storage_bytes(tensor: torch.Tensor, device: torch.device) -> int:
    """What a storage takes on `device`; storages elsewhere are not in its budget."""
    if tensor.device.type != device.type:
        return 0
    return rules_of(device).rounded(int(tensor.untyped_storage().nbytes()))


def generator_indices(device: torch.device) -> list[int]:
    """The devices, besides the CPU, whose generators a computation there may move; as `torch.random.fork_rng` asks."""
    return [device.index or 0] if device.type == "cuda" else []


def total_bytes(device: torch.device) -> int:
    """The memory of the device, which shares such as "80%" are of."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def room_bytes(device: torch.device) -> int | None:
    """What this process has of the device and could still get of it; None where nobody tells."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.mem_get_info(device)[0]) + int(torch.cuda.memory_reserved(device))


def device_name(device: torch.device) -> str:
    """As plans and reports call it."""
    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"
