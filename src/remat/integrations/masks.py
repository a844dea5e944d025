"""Hugging Face transformers, traced as it runs in eager.

When transformers sees a tracer it builds a causal mask even where nothing is padded or packed, in case that changes
later: attention then takes a slower kernel and gives other bits than eager. Remat captures one shape at a time, so the
answer that eager gets is right. Eager looks at positions to see whether several sequences are packed into one. Where
the step counts them up itself, wherever in it the model is, tracing knows their values as well; with a padding mask or
positions from the caller contents would matter, and transformers decides as it likes.
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


def masks_as_in_eager() -> AbstractContextManager[None]:
    """While a step is traced, leave out masks that eager leaves out."""
    module: Any = sys.modules.get(MODULE)
    find_packed = getattr(module, "find_packed_sequence_indices", None)
    answers: dict[str, Any] = {"is_tracing": _is_tracing_padding}
    if find_packed is not None:
        answers["find_packed_sequence_indices"] = _unless_counted(find_packed)
    return _answered(answers)


def is_counted_up(positions: Any) -> bool:
    """Whether positions are known to be one sequence's, each one more than the last; whoever traces has the answer."""
    return False


# One function for all calls, as below.
@functools.cache
def _unless_counted(find_packed: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def find_packed_unless_counted(positions: Any) -> Any:
        return None if is_counted_up(positions) else find_packed(positions)

    return find_packed_unless_counted


def masks_without_positions(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[None]:
    """The same on fake tensors, where nobody knows values: one of the library's own text models counts up."""
    answers: dict[str, Any] = {"is_tracing": _is_tracing_padding}
    if MODULE in sys.modules and _counts_its_positions(getattr(step, "__self__", step), args, kwargs):
        answers["find_packed_sequence_indices"] = _not_packed
    return _answered(answers)


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


def _not_packed(positions: Any) -> None:
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
