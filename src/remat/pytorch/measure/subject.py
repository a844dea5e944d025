"""Whatever a user trains with, as one thing that can be run: a module, a function, a Lightning module, a Trainer.

In: what the user has, and its arguments. Out: a `Subject`: the module or function that Remat wraps, and how a step is
run with it or with its optimized twin. A function is a step as it is; the others are run forward and backward. Other
libraries are known by their shapes, not imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.errors import RematError
from remat.pytorch._compat.trees import tree_leaves
from remat.pytorch.costs.plain_peak import loss_like


# No slots: what the step can reach is found through the attributes of the object.
@dataclass(frozen=True)
class Subject:
    step: Any
    """What is optimized."""
    call: Callable[[Any], Any]
    """The results of `step`, or of what takes its place."""
    inputs: tuple[Any, ...]

    def run(self, step: Any) -> list[torch.Tensor]:
        """One step with `step`; the tensors that it returned."""
        outputs = [leaf for leaf in tree_leaves(self.call(step)) if isinstance(leaf, torch.Tensor)]
        if isinstance(step, nn.Module):
            roots = loss_like(outputs)
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        return outputs


def subject_of(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Subject:
    """`step(*args, **kwargs)`; of a Trainer the first batch, where none is given."""
    if is_trainer(step):
        batch = args[0] if args else next(iter(step.get_train_dataloader()))
        return Subject(step.model, lambda model: step.compute_loss(model, dict(batch)), (batch,))
    if is_lightning(step):
        args = (*args, 0) if len(args) < _places(step.training_step) else args
        return Subject(step, lambda model: model.training_step(*args, **kwargs), (*args, *kwargs.values()))
    if not callable(step):
        raise RematError(f"A {type(step).__name__} is no step; give a module, a function, or a Trainer.")
    return Subject(step, lambda other: other(*args, **kwargs), (*args, *kwargs.values()))


def model_of(step: Any) -> Any:
    """What takes the place of a subject's step: the model of a Trainer, everything else itself."""
    return step.model if is_trainer(step) else step


def is_trainer(step: Any) -> bool:
    """Whether this is a Trainer of transformers, or one like it."""
    return not isinstance(step, nn.Module) and all(
        hasattr(step, name) for name in ("model", "get_train_dataloader", "compute_loss")
    )


def is_lightning(step: Any) -> bool:
    """Whether this is a module of Lightning, under any of its names."""
    return isinstance(step, nn.Module) and any(kind.__name__ == "LightningModule" for kind in type(step).__mro__)


def _places(method: Callable[..., Any]) -> int:
    """How many arguments can be given by position: some take a batch and its number, some the batch alone."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return min(2, sum(item.kind in kinds for item in inspect.signature(method).parameters.values()))
