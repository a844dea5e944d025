"""Lightning's Trainer within a memory budget.

    L.Trainer(callbacks=[Remat(budget="20GiB")])

While it fits, the module's `training_step` runs the plan; when it is done, the module is as before. What the step logs
is noted while it runs and handed to Lightning when it has returned: logging is Python that no tracer follows, and in
the middle of the step it would cut it in two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from remat.core.budget import Budget
from remat.core.results.plan import Plan
from remat.errors import RematError
from remat.integrations.record import PlanRecord
from remat.pytorch.guard.climb import is_distributed
from remat.pytorch.guard.guarded import guarded_call
from remat.pytorch.run.optimize import optimize


class Remat(pl.Callback):
    """Trains a LightningModule within `budget`; `options` are those of `remat.optimize`.

    With `guard`, a step that runs out of memory is rolled back and run again under a tighter plan, as by
    `remat.guarded`; never in parts, whose logs would not be the whole's.
    """

    def __init__(self, budget: str | int | float | Budget, *, guard: bool = True, **options: Any) -> None:
        self._budget = budget
        self._guard = guard
        self._options = options
        self._record: PlanRecord | None = None
        self._in_place = ExitStack()

    @property
    def plan(self) -> Plan | None:
        """The plan in use, or the last of the last fit; None until there is one."""
        return None if self._record is None else self._record.plan

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._take_back()
        if not pl_module.automatic_optimization:
            raise RematError(
                "This module optimizes by itself (automatic_optimization=False), so that its training_step holds "
                "several steps; give remat.optimize the network inside it instead of using this callback."
            )
        self._record = PlanRecord(trainer.log_dir or trainer.default_root_dir, writes=trainer.is_global_zero)
        step = optimize(pl_module.training_step, self._budget, **self._options)
        self._record.follow(step)
        # Other processes would wait while this one runs a step again.
        later = _logging_later(pl_module, step, guard=self._guard and not is_distributed())
        self._in_place.enter_context(_attributes(pl_module, {"training_step": later}))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._record is None:
            return
        if line := self._record.news():
            rank_zero_info(line)
        if metrics := self._record.metrics():
            self.log_dict(metrics, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._record is not None:
            self._record.store()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._take_back()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._take_back()

    def _take_back(self) -> None:
        if self._record is not None:
            self._record.let_go()
        self._in_place.close()


def _logging_later(module: pl.LightningModule, step: Callable[..., Any], *, guard: bool) -> Callable[..., Any]:
    """An optimized `training_step` whose calls of `log` and `log_dict` reach Lightning when it has returned."""
    noted: list[tuple[str, Any, Any]] = []

    def log(*args: Any, **kwargs: Any) -> None:
        noted.append(("log", _detached(args), _detached(kwargs)))

    def log_dict(*args: Any, **kwargs: Any) -> None:
        noted.append(("log_dict", _detached(args), _detached(kwargs)))

    # The same two functions in each step: Dynamo would compile anew for others.
    replaced = {"log": log, "log_dict": log_dict}

    @functools.wraps(step)
    def noting(*args: Any, **kwargs: Any) -> Any:
        noted.clear()
        with _attributes(module, replaced):
            return step(*args, **kwargs)

    run = guarded_call(noting, split=False) if guard else noting

    @functools.wraps(step)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        for name, values, options in noted:
            getattr(module, name)(*values, **options)
        noted.clear()
        return result

    return training_step


@contextmanager
def _attributes(module: pl.LightningModule, replaced: Mapping[str, Any]) -> Iterator[None]:
    """Attributes of the instance, in front of its class's methods, and of others that it had."""
    own = vars(module)
    before = {name: own[name] for name in replaced if name in own}
    own.update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del own[name]
        own.update(before)


def _detached(value: Any) -> Any:
    """Copies without gradients, as Lightning makes them: what is logged holds nothing of the step."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, tuple):
        return tuple(_detached(member) for member in value)
    if isinstance(value, dict):
        return {name: _detached(member) for name, member in value.items()}
    return value
