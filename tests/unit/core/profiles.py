"""A small profile, made by hand: layers that each keep one activation of 100 bytes, and their gradients."""

from __future__ import annotations

from remat.core.results.profile import BEFORE, MemoryClass, Phase, ProfiledOp, ProfiledStorage, StepProfile

SIZE = 100
WORKSPACE = 30


def step_profile(length: int = 2) -> StepProfile:
    """For each layer: `mm` and `relu` forward, `mm_backward` and `mul_` backward; `relu` is what backward waits for."""
    storages = [
        ProfiledStorage(MemoryClass.PARAMETER, SIZE, f"layers.{layer}.weight", f"layers.{layer}", BEFORE, 4 * length)
        for layer in range(length)
    ]
    for layer in range(length):
        storages.append(_kept(layer, length))
        created = 2 * length + 2 * (length - 1 - layer)
        storages.append(
            ProfiledStorage(
                MemoryClass.GRADIENT,
                SIZE,
                f"gradient of layers.{layer}.weight",
                f"layers.{layer}",
                created,
                4 * length,
                recompute_ns=5.0,
            )
        )
    ops = [_op("aten.mm.default", layer, Phase.FORWARD, storages, 2 * layer) for layer in range(length)]
    ops += [_op("aten.relu.default", layer, Phase.FORWARD, storages, 2 * layer + 1) for layer in range(length)]
    ops = [op for pair in zip(ops[:length], ops[length:], strict=True) for op in pair]
    for layer in reversed(range(length)):
        position = len(ops)
        ops.append(_op("aten.mm_backward.default", layer, Phase.BACKWARD, storages, position))
        ops.append(_op("aten.mul_.Tensor", layer, Phase.BACKWARD, storages, position + 1))
    return StepProfile("net", "cpu", "2.13.0", tuple(ops), tuple(storages), length * SIZE, 0.5)


def _kept(layer: int, length: int) -> ProfiledStorage:
    last = 2 * length + 2 * (length - 1 - layer)
    return ProfiledStorage(
        MemoryClass.ACTIVATION,
        SIZE,
        "aten.relu.default",
        f"layers.{layer}",
        created=2 * layer + 1,
        freed=last,
        last_forward_use=2 * layer + 1,
        first_backward_use=last,
        recompute_ns=5.0,
    )


def _op(target: str, layer: int, phase: Phase, storages: list[ProfiledStorage], position: int) -> ProfiledOp:
    live = sum(item.size_bytes for item in storages if item.created <= position <= item.freed)
    came = sum(item.size_bytes for item in storages if item.created == position)
    went = sum(item.size_bytes for item in storages if item.freed == position)
    workspace = WORKSPACE if "mm" in target else 0
    return ProfiledOp(target, f"layers.{layer}", phase, 5.0, came + workspace, went + workspace, workspace, live)
