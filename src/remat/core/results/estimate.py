"""What a training step would need on a device, said before it runs anywhere."""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.devices import Device
from remat.core.results.profile import MemoryClass, StepProfile

LINK_SHARE = 0.8
"""What copies reach of a link's rate: 50 GB/s of the 64 beside an H200."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A step followed on fake tensors, and the device that it is meant for."""

    profile: StepProfile
    device: Device
    optimizer: str = ""
    """Its name; empty where the step is forward and backward alone."""
    amp: str = ""
    """The dtype of autocast; empty without."""

    @property
    def peak_bytes(self) -> int:
        return self.profile.peak_bytes

    @property
    def seconds(self) -> float:
        """One step, by roofline."""
        return self.profile.seconds

    @property
    def margin_bytes(self) -> int:
        """What the device has left at the peak; below 0 where the step does not fit."""
        return self.device.usable_bytes - self.peak_bytes

    @property
    def fits(self) -> bool:
        return self.margin_bytes >= 0

    @property
    def breakdown(self) -> dict[MemoryClass, int]:
        """What the peak is made of, largest first."""
        return self.profile.breakdown()

    @property
    def fixed_bytes(self) -> int:
        """The most that is in memory beside activations: what recomputing them cannot go below."""
        activations = self.profile.bytes_by_class()[MemoryClass.ACTIVATION]
        return max(total - part for total, part in zip(self.profile.during_bytes, activations, strict=True))

    @property
    def offload_bytes(self) -> int:
        """Of the activations at the peak, the most that can be on the host with copies that nobody waits for.

        They leave before that moment and come back after it: half of what the link moves in a step, if it does both.
        """
        moved = self.seconds * 1e9 * LINK_SHARE * self.device.host_bytes_per_ns / 2
        return min(self.breakdown.get(MemoryClass.ACTIVATION, 0), int(moved))
