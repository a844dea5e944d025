"""Runs a script as `python script.py …` would, and follows one of its training steps.

    python -m remat.pytorch.measure.script OUTPUT stop|go-on script.py ARGS…
    python -m remat.pytorch.measure.script OUTPUT stop|go-on -m package ARGS…

A step goes from the end of one optimizer step to the end of the next. The first is followed from the first call of a
model that is trained, in case it is the only one or does not come to its end; the profile is that of the second.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from remat.pytorch._compat.modes import modes_active
from remat.pytorch.measure.follow import Follower, follower_of
from remat.pytorch.measure.optimizer_steps import unwatch_optimizers, watch_optimizers
from remat.pytorch.measure.profile_step import stop_sentence
from remat.pytorch.reach import reachable_from


class ScriptFollower:
    """Follows the first and then the second step of the optimizer that steps first."""

    def __init__(self, name: str, output: Path, stop: bool) -> None:
        self._name, self._output, self._stop = name, output, stop
        self._optimizer: Optimizer | None = None
        self._follower: Follower | None = None
        self._device = torch.device("cpu")
        self._started = self._seconds = 0.0
        self._steps = 0
        self._hook: Any = None

    def install(self) -> None:
        self._hook = register_module_forward_pre_hook(self._model_called)
        watch_optimizers(self)

    def finish(self, error: BaseException | None) -> None:
        """The script is over; what was followed and not yet written is, with the reason."""
        follower = self._end()
        if follower is None:
            return
        reason = "The script ended before its second optimizer step."
        if error is not None and not isinstance(error, SystemExit):
            reason = stop_sentence(follower, error)
        self._write(follower, stopped_by=reason)

    def _model_called(self, module: nn.Module, _: Any) -> None:
        """Begin with the first model that is trained."""
        if self._steps or self._follower is not None or not _is_trained(module):
            return
        self._begin([module], [module], entered=module)

    def optimizer_began(self, optimizer: Optimizer) -> None:
        pass

    def optimizer_returned(self, optimizer: Optimizer) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return
        self._steps += 1
        before = self._end()
        if self._steps == 1:
            models = before.models() if before is not None else []
            self._begin(models, [optimizer, *models], before=before)
            return
        self._hook.remove()
        unwatch_optimizers(self)
        if before is not None:
            self._write(before)
        if self._stop:
            raise SystemExit(0)

    def _begin(
        self,
        models: list[nn.Module],
        reach: list[Any],
        *,
        before: Follower | None = None,
        entered: nn.Module | None = None,
    ) -> None:
        if modes_active():
            # Theirs would be taken for ours when it ends.
            return
        found = reachable_from(reach)
        self._device = found.device()
        self._follower = follower_of(self._device, models)
        self._follower.expect(found)
        if before is not None:
            self._follower.expect_survivors(before)
        self._started = time.perf_counter()
        self._follower.start(entered)

    def _end(self) -> Follower | None:
        follower, self._follower = self._follower, None
        self._seconds = time.perf_counter() - self._started
        if follower is not None:
            follower.stop()
        return follower

    def _write(self, follower: Follower, stopped_by: str = "") -> None:
        follower.profile(self._name, self._device.type, self._seconds, stopped_by=stopped_by).save(self._output)


def _is_trained(module: nn.Module) -> bool:
    return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())


def run(words: list[str]) -> None:
    """Run `script.py ARGS…` or `-m package ARGS…` in this process as its main program."""
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    output, wish, *words = sys.argv[1:]
    # `python -m` put the working directory there; the script shall find what it finds without us.
    sys.path.pop(0)
    name = words[1] if words[0] == "-m" else Path(words[0]).name
    follower = ScriptFollower(name, Path(output), stop=wish == "stop")
    follower.install()
    try:
        run(words)
    except BaseException as error:
        follower.finish(error)
        raise
    follower.finish(None)


if __name__ == "__main__":
    main()
