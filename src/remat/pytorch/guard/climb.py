"""One run of a guarded step, and what is tried when memory runs out.

In: the state before the run, how to run it whole and in parts. Out: its result. The order: the same once more, with
freed memory given back; a tighter plan; the leanest one; halves of the batch, quarters, and so on. What worked is kept
for the next runs. Where nothing does, the last error is raised as it is, with a sentence.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from remat.errors import InfeasibleBudget
from remat.pytorch.guard.memory_errors import is_out_of_memory, let_go_of
from remat.pytorch.guard.parts import Batch, CannotSplit, Reduction, Run, find_reduction
from remat.pytorch.guard.rollback import Before
from remat.pytorch.guard.tighter import Change, in_bytes, tighter_plans
from remat.pytorch.measure.optimizer_steps import unwatch_optimizers, watch_optimizers
from remat.pytorch.run.contract import StepSession

_log = logging.getLogger("remat.guard")
MOST_REFUSALS = 8
"""How often a budget that was lowered is raised again to what the planner says is the least."""


@dataclass(slots=True)
class Climb:
    """What has been learnt of one guarded step, and how it runs."""

    sessions: Callable[[], Sequence[StepSession]]
    reduction: Reduction | None = None
    """What the user says of the loss; None to find out."""
    may_split: bool = True
    failures: int = 0
    """Runs that were rolled back."""
    changes: list[str] = field(default_factory=list)
    """What was changed, a sentence each."""
    parts: dict[int, int] = field(default_factory=dict)
    """In how many parts batches of a size run."""
    _failed_last: bool = False
    _has_tightened: bool = False

    def run(self, attempt: Callable[[int], Any], trial: Run, batch: Batch, before: Before) -> Any:
        """The result of `attempt`, which is told in how many parts to run; `trial` runs forward and backward of a few
        samples, to see what the loss is.
        """
        failure, failures = None, self.failures
        try:
            for count in self._rungs(trial, batch, before):
                if failure is not None:
                    self._abandon_calls()
                try:
                    result = self._attempt(attempt, before, count)
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    failure = error
                else:
                    self._succeed(batch, count, before, has_failed=self.failures > failures)
                    return result
                self._roll_back(failure, before)
        except CannotSplit as refused:
            assert failure is not None, "a batch is split only when the whole of it has failed"
            failure.add_note(f"Nor can the step be run in parts of its batch: {refused}.")
        assert failure is not None, "without a failure the first run is the last"
        before.gradients.finish()
        raise failure

    def split_by(self) -> Reduction:
        """How the loss comes from those of parts."""
        assert self.reduction is not None, "a step is split only when this is known"
        return self.reduction

    def _abandon_calls(self) -> None:
        for session in self.sessions():
            session.abandon_call()

    def _rungs(self, trial: Run, batch: Batch, before: Before) -> Iterator[int]:
        """In how many parts to try next; changes of plans are made on the way."""
        count = self.parts.get(batch.size, 1)
        yield count
        if count == 1:
            if not (self._failed_last and self.sessions()):
                self._tell("as it is, with freed memory given back")
                yield count
            for change in self._tighter():
                self._tell(change.words)
                change.make()
                yield count
        while self.may_split and count < batch.size:
            reduction = self.reduction or find_reduction(trial, batch, before)
            self.reduction = reduction
            count = min(2 * count, batch.size)
            self._tell(f"in {count} parts of its batch, as the loss is a {reduction}")
            yield count

    def _tighter(self) -> Iterator[Change]:
        for change in tighter_plans(self.sessions()):
            self._has_tightened = True
            yield change

    def _tell(self, words: str) -> None:
        _log.info("Out of memory: the step is rolled back and run again %s.", words)
        if words not in self.changes:
            self.changes.append(words)
            warnings.warn(
                f"A training step ran out of memory; it is rolled back and run again {words}.",
                stacklevel=2,
            )

    def _attempt(self, attempt: Callable[[int], Any], before: Before, count: int) -> Any:
        watch_optimizers(before)
        try:
            for refusal in range(MOST_REFUSALS if self._has_tightened else 0):
                try:
                    return attempt(count)
                except InfeasibleBudget as error:
                    least = error.min_budget
                # For this batch the budget was lowered too far.
                before.restore()
                for session in self.sessions():
                    session.set_budget(in_bytes(least + refusal * least // 50))
            return attempt(count)
        finally:
            unwatch_optimizers(before)

    def _roll_back(self, failure: RuntimeError, before: Before) -> None:
        reason = before.reason_against()
        if reason:
            failure.add_note(reason)
            before.gradients.finish()
            raise failure
        self.failures += 1
        let_go_of(failure)
        before.restore()

    def _succeed(self, batch: Batch, count: int, before: Before, *, has_failed: bool) -> None:
        if count > 1:
            self.parts[batch.size] = count
        self._failed_last = has_failed
        before.finish()


def is_distributed() -> bool:
    """Whether other processes wait for this one, which cannot run a step once more on its own."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
