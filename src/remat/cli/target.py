"""From what a user calls a TARGET to a model with its batch.

In: a zoo name, or `package.module:factory` with the working directory on the path. Out: an `Example`. A factory
returns (model, args), (model, args, kwargs) or an `Example`; args that are no tuple are taken as the only argument.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from remat import zoo
from remat.cli.failure import TRACEBACK_VARIABLE
from remat.errors import MissingExtra, RematError, UnknownName
from remat.zoo import Example


def load_target(
    target: str, *, scale: str = "tiny", device: str = "auto", seed: int = 0, sizes: Mapping[str, int] | None = None
) -> Example:
    """The model with its batch; `sizes`, such as `batch`, override its own."""
    torch = _import_torch()
    if target in zoo.REGISTRY:
        return zoo.build(target, scale=scale, device=choose_device(device), seed=seed, **(sizes or {}))
    factory = _find_factory(target)
    torch.manual_seed(seed)
    example = _as_example(target, _call(target, factory, sizes or {}))
    return example if device == "auto" else _move(example, choose_device(device))


def sized_target(
    target: str, axis: str, *, scale: str = "tiny", device: str = "auto", seed: int = 0
) -> tuple[Callable[[int], Example], int]:
    """The target as a function of its batch or length, and the size it has by itself.

    Zoo models and factories that take `batch` or `length` are built at each size; otherwise the tensors of the
    target's own batch are repeated or cut.
    """
    example = load_target(target, scale=scale, device=device, seed=seed)
    from remat.pytorch.resize import resized, size_along

    usual = size_along(example, axis)
    if target not in zoo.REGISTRY and axis not in inspect.signature(_find_factory(target)).parameters:
        return lambda size: resized(example, axis, size), usual
    return lambda size: load_target(target, scale=scale, device=device, seed=seed, sizes={axis: size}), usual


@contextmanager
def runs_target(target: str) -> Iterator[None]:
    """While the user's model runs: what it raises becomes one sentence, and torch's tracebacks stay out of the way."""
    if os.environ.get(TRACEBACK_VARIABLE) or target in zoo.REGISTRY:
        yield
        return
    logging.disable(logging.ERROR)
    try:
        yield
    except RematError:
        raise
    except Exception as error:
        raise RematError(
            f"The model of {target!r} cannot be run on its batch: {cause_of(error)}; run it without Remat first, "
            f"or set {TRACEBACK_VARIABLE}=1 to see where."
        ) from error
    finally:
        logging.disable(logging.NOTSET)


def cause_of(error: Exception) -> str:
    """What the user's code raised; torch wraps it in a page of its own while it traces."""
    inner = re.search(r"got (\w+)\((['\"])(.*?)\2\)", str(error), re.DOTALL)
    if inner is not None:
        return f"{inner[1]}: {inner[3]}".rstrip(".")
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": .")


def choose_device(device: str) -> str:
    """`auto` is CUDA where there is one; a device that torch cannot use is refused."""
    torch = _import_torch()
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UnknownName(f"Cannot use the device {device!r}: {str(error).splitlines()[0]}") from error
    return device


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingExtra("This command runs PyTorch models; install `remat[torch]`.") from error
    return torch


def _find_factory(target: str) -> Callable[..., object]:
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise UnknownName(
            f"{target!r} is neither a zoo model ({', '.join(zoo.REGISTRY)}) nor of the form package.module:factory."
        )
    # The console script, unlike `python -m`, does not look in the working directory by itself.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UnknownName(
            f"Cannot import {error.name!r} for the target {target!r}; is it installed or here?"
        ) from error
    except Exception as error:
        raise RematError(f"Importing the target {target!r} raised {type(error).__name__}: {error}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise UnknownName(f"{module_name!r} has no function {name!r}; write package.module:factory.")
    return factory


def _call(target: str, factory: Callable[..., object], sizes: Mapping[str, int]) -> object:
    try:
        return factory(**sizes)
    except Exception as error:
        raise RematError(f"Calling the target {target!r} raised {type(error).__name__}: {error}") from error


def _as_example(target: str, made: object) -> Example:
    if isinstance(made, Example):
        return made
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        raise RematError(
            f"The target {target!r} returned {type(made).__name__}; return (model, args) or (model, args, kwargs)."
        )
    model, args, *rest = made
    kwargs = rest[0] if rest else {}
    if not isinstance(kwargs, Mapping):
        raise RematError(f"The target {target!r} returned {type(kwargs).__name__} as keyword arguments; return a dict.")
    return Example(model, args if isinstance(args, tuple) else (args,), kwargs)


def _move(example: Example, device: str) -> Example:
    return Example(
        example.model.to(device),
        tuple(_moved(value, device) for value in example.args),
        {key: _moved(value, device) for key, value in example.kwargs.items()},
    )


def _moved(value: Any, device: str) -> Any:
    """`value` with every tensor in its lists, tuples and dicts on `device`."""
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device) for item in value)
    return value.to(device) if hasattr(value, "to") else value
