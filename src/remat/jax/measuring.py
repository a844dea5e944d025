"""What a step really needs and takes, once compiled.

In: a function and its arguments. Out: a `CompiledMeasurement`: XLA's account of its memory, and the time of a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from remat.errors import RematError
from remat.jax.costs.compiled import StepMemory, compiler_options, memory_of
from remat.jax.graph.leaves import Leaves

RUNS = 3


@dataclass(frozen=True, slots=True)
class CompiledMeasurement:
    """What one compiled step needs."""

    memory: StepMemory
    seconds: float
    """The fastest of a few runs."""

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    @property
    def temporary_bytes(self) -> int:
        return self.memory.temporary_bytes

    @property
    def breakdown(self) -> dict[str, int]:
        """What the peak is made of, in bytes; adds up to `peak_bytes`."""
        memory = self.memory
        return {
            "arguments": memory.argument_bytes,
            "results": memory.result_bytes - memory.shared_bytes,
            "temporaries": memory.temporary_bytes,
        }


def measure(
    step: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> CompiledMeasurement:
    """Compile `step`, such as `jax.value_and_grad(loss)`, and run it; arguments must be real arrays."""
    leaves = Leaves.of(args, kwargs)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves.arrays):
        raise RematError("measure runs the step; hand it arrays instead of shapes.")
    chosen = compiler_options() if options is None else dict(options)
    run = jax.jit(lambda *arrays: leaves.call(step, arrays), compiler_options=chosen)
    compiled = run.lower(*leaves.arrays).compile()
    jax.block_until_ready(compiled(*leaves.arrays))
    taken = [_seconds(compiled, leaves) for _ in range(RUNS)]
    return CompiledMeasurement(memory_of(compiled), min(taken))


def _seconds(compiled: Any, leaves: Leaves) -> float:
    began = time.perf_counter()
    jax.block_until_ready(compiled(*leaves.arrays))
    return time.perf_counter() - began
