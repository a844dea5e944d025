"""What a gradient scaler remembers of the step under way, which it tells nobody."""

from __future__ import annotations

from collections.abc import Callable

import torch


def scaler_restorer(scaler: torch.amp.GradScaler) -> Callable[[], None]:
    """What puts a scaler back to where it is now: whether it has unscaled each optimizer's gradients, and its scale.

    Torch's own class keeps these in private attributes; the public ones tell the scale alone.
    """
    states = {key: dict(state) for key, state in scaler._per_optimizer_states.items()}
    scale, tracker = scaler._scale, scaler._growth_tracker
    # Tensors of one element: `update` writes into them.
    values = [None if item is None else item.clone() for item in (scale, tracker)]

    def restore() -> None:
        scaler._per_optimizer_states.clear()
        scaler._per_optimizer_states.update({key: dict(state) for key, state in states.items()})
        for item, value in zip((scale, tracker), values, strict=True):
            if item is not None and value is not None:
                item.copy_(value)
        scaler._scale, scaler._growth_tracker = scale, tracker

    return restore
