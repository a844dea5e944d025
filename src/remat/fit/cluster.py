"""The machines that a model is to be trained on: how many of which device, and what lies between them.

In: names of the catalogues. Out: a `Cluster`, which knows what collectives and copies to the host take.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from remat.core.devices import Device, DeviceKind, find_device, known_devices
from remat.errors import RematError
from remat.fit.known_links import KnownLink, find_link, known_links, usual_link
from remat.pytorch.costs.collective_costs import RankLink

MARGIN = 0.04
"""Of a GPU's memory, what is left to its allocator: blocks are larger than what was asked for, and lie apart."""
HOST_BYTES_PER_S = 10e9
"""What an optimizer that steps on the host reads and writes for one rank."""


@dataclass(frozen=True, slots=True)
class Cluster:
    device: Device
    gpus: int
    inside: KnownLink
    """Between devices of one machine."""
    between: KnownLink
    """Between machines, for each device."""
    host: KnownLink
    """Between a device and its host."""
    per_machine: int = 8
    memory_bytes: int | None = None
    """What of each device may be used, where that is not all of it."""

    @property
    def capacity_bytes(self) -> int:
        """Of one device, for the step's live bytes."""
        usable = self.device.usable_bytes if self.memory_bytes is None else self.memory_bytes
        return int(usable * (1 - (MARGIN if self.device.kind is DeviceKind.CUDA else 0)))

    def link(self, ranks: int) -> RankLink:
        """What the slowest of so many ranks in a ring have between them."""
        found = self.inside if ranks <= self.per_machine else self.between
        return RankLink(found.bytes_per_s, found.latency_s)


def find_cluster(
    gpu: str,
    gpus: int = 1,
    *,
    link: str | None = None,
    between: str = "InfiniBand-400",
    per_machine: int = 8,
    memory_bytes: int | None = None,
    devices: Iterable[str | Path] = (),
    links: Iterable[str | Path] = (),
) -> Cluster:
    """A cluster by names; what is unknown is refused with the list of what is known."""
    if gpus < 1 or per_machine < 1:
        raise RematError(f"{gpus} GPUs in machines of {per_machine} are none; give 1 or more.")
    device = find_device(gpu, known_devices(Path(file) for file in devices))
    catalogue = known_links(links)
    inside = usual_link(device.name, catalogue) if link is None else find_link(link, catalogue)
    host = (
        inside if inside.name.startswith("PCIe") else find_link("PCIe5" if _is_recent(device) else "PCIe4", catalogue)
    )
    return Cluster(device, gpus, inside, find_link(between, catalogue), host, per_machine, memory_bytes)


def _is_recent(device: Device) -> bool:
    """Devices that compute in fp8 sit on PCIe 5."""
    return any(name == "fp8" for name, _ in device.flops_per_ns)
