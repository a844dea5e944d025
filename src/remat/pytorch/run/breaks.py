"""What Dynamo could not trace, told to the user once."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from remat.pytorch._compat.dynamo import GraphEnd, break_sentence
from remat.pytorch.resident.memory import ResidentMemory


class TellsBreaks:
    """A session that warns of what it cannot plan."""

    owner: ResidentMemory
    broken: bool
    """Whether Dynamo has met something in this call that it cannot trace."""

    def note_break(self, end: GraphEnd) -> None:
        """Say once what Dynamo could not trace; calling backward is how a step's forward ends."""
        if not end.is_backward_call:
            self.broken = True
            self._tell(end.reason)

    def _tell(self, sentence: str) -> None:
        # FSDP2 gathers and frees parameters in hooks that it asks Dynamo not to trace: nobody loses anything by them.
        if not (self.owner.is_sharded() and ("`disable`" in sentence or "FSDP" in sentence)):
            warnings.warn(f"Not planned, runs as before: {sentence}", stacklevel=4)

    def note_skipped(self, reasons: Iterable[str]) -> None:
        """Say what Dynamo gave up on where it left a whole function out, so that no graph ends there."""
        for sentence in filter(None, dict.fromkeys(map(break_sentence, () if self.broken else reasons))):
            self._tell(sentence)
