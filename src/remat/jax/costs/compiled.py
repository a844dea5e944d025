"""What XLA makes of a step, and how much memory it needs.

In: a step of flat arguments: forward and backward, plain or under a schedule. Out: `StepMemory`, from the compiled
program's own account. `peak_memory_in_bytes` leaves temporaries out on some backends, so the peak is counted here as
temporaries, arguments and results, less what results share with arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from remat.errors import CaptureError
from remat.jax import _compat

CPU_OPTIONS: Mapping[str, Any] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""XLA's default order on CPUs does not look at memory: recomputation saves nothing in it."""
PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")

Pull = Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]
"""From arguments and cotangents to results and gradients; cotangents are ones where none are given."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What a compiled step needs."""

    temporary_bytes: int
    argument_bytes: int
    result_bytes: int
    shared_bytes: int
    """Results that lie in arguments which were given up."""

    @property
    def peak_bytes(self) -> int:
        return self.temporary_bytes + self.argument_bytes + self.result_bytes - self.shared_bytes


def platform() -> str:
    """Where jax runs by default; refused where XLA's account of memory is not known."""
    found = str(default_device().platform)
    if found not in PLATFORMS:
        raise CaptureError(f"Remat does not know the jax backend `{found}`; it runs on {', '.join(PLATFORMS)}.")
    return found


def default_device() -> Any:
    chosen = jax.config.jax_default_device
    return chosen if hasattr(chosen, "platform") else jax.local_devices(backend=chosen)[0]


def compiler_options(backend: str | None = None) -> dict[str, Any]:
    """What to hand to `jax.jit(…, compiler_options=…)` so that XLA keeps to schedules made for memory."""
    return dict(CPU_OPTIONS) if (backend or platform()) == "cpu" else {}


def memory_of(compiled: Any) -> StepMemory:
    found = compiled.memory_analysis()
    if found is None:
        raise CaptureError("This jax backend does not tell how much memory a compiled program needs.")
    return StepMemory(
        int(found.temp_size_in_bytes),
        int(found.argument_size_in_bytes),
        int(found.output_size_in_bytes),
        int(found.alias_size_in_bytes),
    )


def compile_step(pull: Pull, avals: Sequence[Any], cotangents: Sequence[Any], options: Mapping[str, Any] | None) -> Any:
    """Forward and backward as one program; the cotangent of a lone scalar is one, as for `jax.grad`.

    Inside `shard_map`, what is compiled is what one device runs, collectives included.
    """
    if is_loss(cotangents):

        def step(*leaves: Any) -> Any:
            return pull(leaves, [jnp.ones(item.shape, item.dtype) for item in cotangents])

        return _compiled(step, avals, options)
    count = len(avals)

    def general(*leaves: Any) -> Any:
        return pull(leaves[:count], leaves[count:])

    return _compiled(general, [*avals, *cotangents], options)


def _compiled(step: Callable[..., Any], avals: Sequence[Any], options: Mapping[str, Any] | None) -> Any:
    mesh = _compat.manual_mesh()
    if mesh is None:
        placed = map(_compat.concretely_placed, avals)
        return jax.jit(step, compiler_options=dict(options or {})).lower(*placed).compile()
    with ThreadPoolExecutor(1) as clean:
        # What is being traced belongs to this thread; another one compiles as from outside of it.
        return clean.submit(_compiled_within, step, avals, options, mesh).result()


def _compiled_within(
    step: Callable[..., Any], avals: Sequence[Any], options: Mapping[str, Any] | None, mesh: Any
) -> Any:
    """As one device of the mesh runs it; each is given all of the arguments, which have the shapes of its part."""
    nowhere = jax.sharding.PartitionSpec()
    local = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    run = jax.shard_map(step, mesh=_compat.concrete_mesh(mesh), in_specs=nowhere, out_specs=nowhere, check_vma=False)
    return jax.jit(run, compiler_options=dict(options or {})).lower(*local).compile()


def is_loss(cotangents: Sequence[Any]) -> bool:
    return len(cotangents) == 1 and cotangents[0].shape == ()
