"""From what a user calls a TARGET to a model with its batch.

In: a zoo name, or `package.module:factory` with the working directory on the path, and sizes such as the batch, which a
factory takes as keyword arguments. Out: an `Example`, or what the factory returned. One for PyTorch returns (model,
args), (model, args, kwargs) or an `Example`; args that are no tuple are taken as the only argument.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from remat import zoo
from remat.cli.terminal.failure import TRACEBACK_VARIABLE
from remat.errors import MissingExtra, RematError, UnknownName
from remat.zoo import Example
from remat.zoo.example import as_example

NO_SIZES: Mapping[str, float] = MappingProxyType({})


def load_target(
    target: str,
    *,
    scale: str = "tiny",
    device: str = "auto",
    seed: int = 0,
    sizes: Mapping[str, float] = NO_SIZES,
) -> Example:
    """A PyTorch model with its batch."""
    if is_in_zoo(target):
        return zoo.build(target, scale=scale, device=choose_device(device), seed=seed, **sizes)
    return example_of(target, call_target(target, seed, sizes), device)


def call_target(target: str, seed: int, sizes: Mapping[str, float]) -> object:
    """What the factory returns, whatever that is; its random numbers depend on `seed` where it uses PyTorch's."""
    factory = _find_factory(target)
    if sys.modules.get("torch") is not None or "jax" not in sys.modules:
        _import_torch().manual_seed(seed)
    return _call(target, factory, sizes)


def example_of(target: str, made: object, device: str) -> Example:
    """What a factory returned as a PyTorch model on `device`."""
    if is_jax_loss(made):
        raise RematError(f"{target!r} is a JAX loss, and this command takes PyTorch models only.")
    example = as_example(made, f"The target {target!r}")
    return example if device == "auto" else _move(example, choose_device(device))


def is_jax_loss(made: object) -> bool:
    """Whether a factory returned (loss, parameters, batch) of jax; nothing is imported to find out."""
    jax = sys.modules.get("jax")
    if jax is None or not (isinstance(made, tuple) and len(made) == 3 and callable(made[0])):
        return False
    return any(isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) for leaf in jax.tree.leaves(made[1]))


def takes_size(target: str, axis: str) -> bool:
    """Whether the factory can be called with a batch or length."""
    return axis in inspect.signature(_find_factory(target)).parameters


def read_sizes(settings: Sequence[str], **named: int | None) -> dict[str, float]:
    """`["width=64", "dropout=0.1"]` and sizes with options of their own, those that are given, as numbers."""
    sizes: dict[str, float] = {name: count for name, count in named.items() if count is not None}
    for setting in settings:
        name, _, number = setting.partition("=")
        try:
            sizes[name] = int(number) if number.lstrip("-").isdigit() else float(number)
        except ValueError as error:
            raise UnknownName(f"Cannot read the size {setting!r}; write name=number, as batch=4.") from error
    return sizes


def is_in_zoo(target: str) -> bool:
    return target in zoo.REGISTRY or target in zoo.PRESETS


@contextmanager
def runs_target(target: str) -> Iterator[None]:
    """While the user's model runs: what it raises becomes one sentence, and torch's tracebacks stay out of the way."""
    if os.environ.get(TRACEBACK_VARIABLE) or is_in_zoo(target):
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
            f"{target!r} is neither a zoo model ({', '.join((*zoo.REGISTRY, *zoo.PRESETS))}) nor of the form "
            "package.module:factory."
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


def _call(target: str, factory: Callable[..., object], sizes: Mapping[str, float]) -> object:
    try:
        inspect.signature(factory).bind(**sizes)
    except TypeError as error:
        raise UnknownName(f"The target {target!r} cannot be called with sizes ({error}); see its arguments.") from error
    except ValueError:
        # A function without a signature, as a builtin: it says itself what it does not take.
        pass
    try:
        return factory(**sizes)
    except Exception as error:
        raise RematError(f"Calling the target {target!r} raised {type(error).__name__}: {error}") from error


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
