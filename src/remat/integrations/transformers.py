"""transformers' Trainer, and those of TRL that are built on it, within a memory budget.

    Trainer(model, args, callbacks=[RematCallback(budget="20GiB")], ...)

While it trains, calling the model runs the plan. The model stays the object that it was, so that checkpoints,
evaluation, `generate` and whoever holds it see no difference, and when training ends its call is as before. Where
Trainer reads nothing but the loss, the planned step returns nothing else: nobody holds the logits.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from remat.core.budget import Budget
from remat.core.results.plan import Plan
from remat.errors import RematError
from remat.integrations.loss_only import LossOnly
from remat.integrations.record import PlanRecord
from remat.pytorch._compat.tensors import compiled_call, plain_call, replace_call
from remat.pytorch.guard.climb import is_distributed
from remat.pytorch.guard.guarded import guarded_call
from remat.pytorch.run.optimize import optimize

_log = logging.get_logger("transformers.remat")


class RematCallback(TrainerCallback):
    """Trains Trainer's model within `budget`; `options` are those of `remat.optimize`.

    With `guard`, a step that runs out of memory is rolled back and run again with less, as by `remat.guarded`.
    """

    def __init__(self, budget: str | int | float | Budget, *, guard: bool = True, **options: Any) -> None:
        self._budget = budget
        self._guard = guard
        self._options = options
        self._record: PlanRecord | None = None
        self._undo: list[Callable[[], Any]] = []

    @property
    def plan(self) -> Plan | None:
        """The plan in use, or the last of the last training; None until there is one."""
        return None if self._record is None else self._record.plan

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self._take_back()
        _refuse_what_cannot_be_planned(args)
        trainer = self._trainer()
        if trainer is not None:
            # Before the library's own callbacks, which report what is logged; they are being called, so in a new list.
            handler = trainer.callback_handler
            handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]
        self._stop_checkpointing(model, args)
        self._record = PlanRecord(args.output_dir, writes=state.is_world_process_zero)
        self._put_in_place(model, _labels_read_by_model(trainer))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._record is not None and (line := self._record.news()):
            _log.info(line)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Metrics of the plan beside those of training, in what is reported and in the history."""
        if logs is not None and "loss" in logs and self._record is not None:
            for entry in (logs, *state.log_history[-1:]):
                entry.update(self._record.metrics())

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._record is not None:
            self._record.store()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._record is not None:
            self._record.store()
        self._take_back()

    def _trainer(self) -> Trainer | None:
        """Who calls; a callback is not told."""
        found = (item for item in gc.get_objects() if issubclass(type(item), Trainer))
        return next((trainer for trainer in found if self in trainer.callback_handler.callbacks), None)

    def _stop_checkpointing(self, model: Any, args: TrainingArguments) -> None:
        """The plan says what is recomputed; checkpointing beside it would do so twice. TRL's is on by default."""
        if getattr(model, "is_gradient_checkpointing", False):
            _log.info("Remat: gradient_checkpointing is off during this training; the plan says what is recomputed.")
            model.gradient_checkpointing_disable()
            self._undo.append(lambda: model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs))

    def _put_in_place(self, model: nn.Module, labels: Sequence[str]) -> None:
        """Let the model's call run the plan; with `labels` one that returns the loss alone."""
        assert self._record is not None
        plain, before = plain_call(model), compiled_call(model)
        step = optimize(_LossInPlace(model) if labels else plain, self._budget, **self._options)
        self._record.follow(step)
        # Other processes would wait while this one runs a step again.
        step = guarded_call(step) if self._guard and not is_distributed() else step

        def call(*args: Any, **kwargs: Any) -> Any:
            if not (model.training and torch.is_grad_enabled()):
                return plain(*args, **kwargs)
            if not labels:
                return step(*args, **kwargs)
            return {"loss": step(*args, **kwargs)} if any(name in kwargs for name in labels) else plain(*args, **kwargs)

        replace_call(model, call)
        self._undo.append(lambda: replace_call(model, before))

    def _take_back(self) -> None:
        if self._record is not None:
            self._record.let_go()
        while self._undo:
            self._undo.pop()()


class _LossInPlace(LossOnly):
    """The loss by the model's own code, whatever its call was replaced with."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        outputs = plain_call(self.model)(*args, **kwargs)
        loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        return loss


def _labels_read_by_model(trainer: Trainer | None) -> Sequence[str]:
    """Names of the labels where the model computes the loss and Trainer's own code reads nothing else; else none."""
    if trainer is None or type(trainer).compute_loss is not Trainer.compute_loss:
        return ()
    reads_logits = trainer.compute_loss_func is not None or trainer.label_smoother is not None
    return () if reads_logits else tuple(trainer.label_names)


def _refuse_what_cannot_be_planned(args: TrainingArguments) -> None:
    if args.torch_compile:
        raise RematError(
            "Trainer compiles this model by itself (torch_compile=True), and Remat plans nothing of it; leave that "
            'out, or give RematCallback compiler="inductor" in its place.'
        )
    if args.n_gpu > 1:
        raise RematError(
            f"Trainer copies this model to {args.n_gpu} devices in one process (DataParallel), and Remat plans one; "
            "show it one device (CUDA_VISIBLE_DEVICES=0)."
        )
