"""`remat profile`: what fills the memory of one real training step, of a target or of an unmodified script."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remat.cli.options import AmpOption, DeviceOption, JsonOption, OptimizerOption, ScaleOption, SeedOption
from remat.cli.request import check_folder
from remat.cli.script import is_script, profile_script
from remat.cli.subjects import open_subject
from remat.cli.target import runs_target
from remat.cli.terminal.console import log, show, show_json, working
from remat.errors import ProfileStopped, UnknownName
from remat.report.tables.profile import profile_facts, profile_tables

if TYPE_CHECKING:
    from remat.core.results.profile import StepProfile

WordsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="TARGET | -- python SCRIPT ARGS…",
        help="A zoo model or `package.module:factory`; or, after `--`, a Python command to run as it is.",
        show_default=False,
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the whole profile to this JSON file.", show_default=False)
]
TopOption = Annotated[int, typer.Option("--top", min=1, help="Rows of storages and of modules.")]
StopOption = Annotated[bool, typer.Option("--stop", help="End a script once its second step has been followed.")]


def profile(
    words: WordsArgument,
    optimizer: OptimizerOption = "adamw",
    amp: AmpOption = "none",
    output: OutputOption = None,
    top: TopOption = 15,
    stop: StopOption = False,
    scale: ScaleOption = "tiny",
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """See where the memory of one training step goes, op by op."""
    check_folder(output)
    tell = partial(_tell, output=output, top=top, as_json=as_json)
    if is_script(words):
        profile_script(words, tell, stop=stop)
        return
    if len(words) > 1:
        raise UnknownName(f"remat profile takes one TARGET, or `--` and a Python command; found {' '.join(words)!r}.")
    try:
        found = _profile_target(words[0], optimizer, amp, scale=scale, device=device, seed=seed)
    except ProfileStopped as error:
        tell(error.profile)
        raise
    tell(found)


def _profile_target(target: str, optimizer: str, amp: str, *, scale: str, device: str, seed: int) -> StepProfile:
    subject = open_subject(target, scale=scale, device=device, seed=seed)
    with working(f"Profiling {target}"), runs_target(target):
        return subject.profile(optimizer, amp)


def _tell(found: StepProfile, output: Path | None, top: int, as_json: bool) -> None:
    if as_json:
        show_json(profile_facts(found, top))
    else:
        show(*profile_tables(found, top))
    if output is not None:
        found.save(output)
        log(f"Wrote {output}")
