"""Hugging Face transformers, traced as it runs in eager.

When transformers sees a tracer it builds a causal mask even where nothing is padded or packed, in case that changes
later: attention then takes a slower kernel and gives other bits than eager. Remat captures one shape at a time, so the
answer that eager gets is right. Eager looks at positions to see whether several sequences are packed into one; a text
model that makes its positions itself counts them up, so they are not. With a padding mask or positions from the caller
contents would matter, and transformers decides as it likes.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from remat.integrations.loss_only import LossOnly

MODULE = "transformers.masking_utils"


@contextmanager
def masks_as_in_eager(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """While `step(*args, **kwargs)` is traced, leave out masks that eager leaves out."""
    answers: dict[str, Any] = {"is_tracing": _is_tracing_padding}
    if MODULE in sys.modules and _counts_its_positions(getattr(step, "__self__", step), args, kwargs):
        answers["find_packed_sequence_indices"] = _not_packed
    with _answered(answers):
        yield


def masks_by_value() -> AbstractContextManager[None]:
    """Let transformers look into masks as in eager although tensors are fake: for steps whose values are followed."""
    return _answered({"is_tracing": _is_not_tracing})


@contextmanager
def _answered(answers: Mapping[str, Any]) -> Iterator[None]:
    module: Any = sys.modules.get(MODULE)
    replaced = {name: getattr(module, name) for name in answers if hasattr(module, name)}
    for name in replaced:
        setattr(module, name, answers[name])
    try:
        yield
    finally:
        for name, original in replaced.items():
            setattr(module, name, original)


# One function for all calls: Dynamo recompiles where a global it has seen becomes another object.
def _is_tracing_padding(padding_mask: Any = None) -> bool:
    return padding_mask is not None


def _is_not_tracing(*_: Any) -> bool:
    return False


def _not_packed(position_ids: Any) -> None:
    return None


def _counts_its_positions(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this is one of the library's own text models, called without positions; also inside a `LossOnly`."""
    if isinstance(model, LossOnly):
        model = model.model
    config: Any = getattr(model, "config", None)
    if not type(model).__module__.startswith("transformers.") or not hasattr(config, "get_text_config"):
        return False
    given = {*_parameters_of(type(model).forward)[: len(args)], *kwargs}
    return config.get_text_config() is config and "position_ids" not in given


@functools.cache
def _parameters_of(method: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a method's parameters, without `self`."""
    return tuple(inspect.signature(method).parameters)[1:]
