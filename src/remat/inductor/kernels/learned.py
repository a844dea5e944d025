"""What timed kernels say of the prices of others: by how much ops of some looks are dearer or cheaper than thought.

In: timed kernels, and the joint graph whose nodes they compute. Out: `Learned` factors by what a node does
(`JointNode.work`), kept on disk for each device: the next plan of a model, for whatever budget, starts with them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch

from remat.core.cache_file import CacheFile, cache_folder
from remat.core.document import Record
from remat.errors import FileFormatError
from remat.inductor.kernels.clock import TimedKernel
from remat.inductor.model.joint import Joint, Kind
from remat.inductor.model.program import MeasuredRates, computed_bytes
from remat.pytorch.costs.op_costs import device_key

FORMAT, VERSION = "remat-kernel-prices", 1
MOST = 8.0
"""A factor beyond this, or below its inverse, is a mistake of ours rather than a price."""


def factors_of(joint: Joint, rates: MeasuredRates, kernels: Iterable[TimedKernel]) -> dict[str, float]:
    """What kernels took over what their reads, writes and ops were thought to take, by the work of their nodes."""
    number_of = {node.name: number for number, node in enumerate(joint.nodes)}
    taken: defaultdict[str, float] = defaultdict(float)
    thought: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels:
        numbers = [number_of[name] for name in kernel.text.nodes if name in number_of]
        computed = sum(computed_bytes(joint, number, rates) for number in numbers)
        expected = rates.kernel_ns + (kernel.moved_bytes + computed) / rates.bytes_per_ns
        for work in {joint.nodes[number].work for number in numbers if _is_fused(joint, number)}:
            taken[work] += kernel.times * kernel.time_ns
            thought[work] += kernel.times * expected
    return {work: min(MOST, max(1 / MOST, taken[work] / thought[work])) for work in taken}


def _is_fused(joint: Joint, number: int) -> bool:
    return joint.nodes[number].kind in (Kind.FUSED, Kind.SUM)


class KernelPrices:
    """The file of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device_key = device_key(device)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self._device_key)
        path = cache_folder() / "kernels" / f"{name}.json"
        self._file = CacheFile(path, FORMAT, VERSION, "prices of kernels are learnt again")

    def load(self) -> dict[str, float]:
        return self._file.read(self._decode) or {}

    def add(self, factors: Mapping[str, float]) -> None:
        if factors:
            self._file.update(lambda: {"device": self._device_key, "factors": {**self.load(), **factors}})

    def _decode(self, record: Record) -> dict[str, float]:
        if record.text("device") != self._device_key:
            raise FileFormatError(f"{record.where} was written for another device.")
        factors = record.record("factors")
        found = {work: factors.number(work) for work in factors.fields}
        if any(not 1 / MOST <= factor <= MOST for factor in found.values()):
            raise FileFormatError(f"{record.where}: a factor of a price must be from {1 / MOST:g} to {MOST:g}.")
        return found
