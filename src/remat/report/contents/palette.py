"""One colour for each class of memory and each phase, on light and on dark paper.

Neighbours in a stack differ in lightness as well as in hue, so that they stay apart for colour-blind readers and in
print.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.results.profile import MemoryClass, Phase


@dataclass(frozen=True, slots=True)
class Ink:
    light: str
    dark: str


CLASS_INK = {
    MemoryClass.PARAMETER: Ink("#35508f", "#6f8de0"),
    MemoryClass.BUFFER: Ink("#7f95c9", "#a9bbf0"),
    MemoryClass.OPTIMIZER_STATE: Ink("#7b5ba6", "#a987dd"),
    MemoryClass.INPUT: Ink("#bfaedb", "#d6c8f2"),
    MemoryClass.GRADIENT: Ink("#d1582b", "#f0875a"),
    MemoryClass.ACTIVATION: Ink("#1f9aa8", "#2fb3c2"),
    MemoryClass.WORKSPACE: Ink("#f0b429", "#f5cc62"),
    MemoryClass.OTHER: Ink("#98a2ad", "#77828f"),
}
PHASE_INK = {
    Phase.FORWARD: Ink("#b8c4d0", "#566474"),
    Phase.RECOMPUTE: Ink("#c2255c", "#f06595"),
    Phase.BACKWARD: Ink("#66788a", "#93a4b5"),
    Phase.OPTIMIZER: Ink("#7b5ba6", "#a987dd"),
}


def slug(name: str) -> str:
    """`optimizer state` as the part of a CSS name."""
    return name.replace(" ", "-")
