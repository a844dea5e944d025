"""The chosen way to train as a file that others run: a script, or the settings of a library.

In: `Levers`, and what to train. Out: a file, whole or not at all, and what it has no place for. A new kind is one file
with a function from levers to `Exported`, and one line of `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from remat.core.document import write_text
from remat.errors import RematError, UnknownName
from remat.fit.export.accelerate_config import write_accelerate
from remat.fit.export.deepspeed_config import write_deepspeed
from remat.fit.export.exported import Exported, ScriptTarget
from remat.fit.export.script import write_script
from remat.fit.export.training_arguments import write_trainer
from remat.fit.levers import Levers, Zero

KINDS: Mapping[str, Callable[[Levers, ScriptTarget], Exported]] = MappingProxyType(
    {
        "script": write_script,
        "deepspeed": write_deepspeed,
        "accelerate": write_accelerate,
        "trainer": write_trainer,
    }
)
"""A script of plain PyTorch, DeepSpeed's JSON, Accelerate's YAML, and TrainingArguments of transformers as JSON."""


def export(
    levers: Levers, kind: str, path: str | Path, *, target: str = "", sizes: Mapping[str, float | str] | None = None
) -> Exported:
    """Write `levers` to `path` as one of `KINDS`; `target` and its `sizes` are what a script trains.

    What comes back says in `notes` what the file has no place for.
    """
    exported = render(levers, kind, ScriptTarget(target, sizes or {}, Path(path).name))
    write_text(Path(path), exported.text)
    return exported


def render(levers: Levers, kind: str, subject: ScriptTarget) -> Exported:
    """The same without writing."""
    check_kind(kind)
    if levers.replicas == 1:
        # Nobody to share with.
        levers = replace(levers, zero=Zero.REPLICATED)
    if obstacle := levers.check().obstacle:
        raise RematError(f"This way to train cannot be exported. {obstacle}")
    return KINDS[kind](levers, subject)


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise UnknownName(f"Cannot export as {kind!r}; known are {', '.join(KINDS)}.")
