"""`remat estimate`: what a training step would need and take on a device, from fake tensors alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remat.cli.options import AmpOption, JsonOption, OptimizerOption, ScaleOption, TargetArgument
from remat.cli.request import check_folder
from remat.cli.subjects import DeviceRequest, TargetSubject, open_subject
from remat.cli.target import cause_of, read_sizes, runs_target
from remat.cli.terminal.console import log, show, show_json, working
from remat.core.devices import find_device, known_devices
from remat.errors import UnknownName
from remat.report.tables.estimate import estimate_facts, estimate_tables

if TYPE_CHECKING:
    from collections.abc import Mapping

GpuOption = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help="A device of the catalogue, as A100-40GB; without it, this machine's."),
]
BatchOption = Annotated[
    int | None, typer.Option("--batch", min=1, help="Batch, where the target has that size.", show_default=False)
]
LengthOption = Annotated[
    int | None, typer.Option("--length", min=1, help="Length, where the target has that size.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=NUMBER", help="Any other size of the target; may be given often."),
]
DevicesOption = Annotated[
    list[Path] | None,
    typer.Option("--devices", metavar="FILE", help="A file that describes more devices; may be given often."),
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the step as a profile to this JSON file.")
]
TopOption = Annotated[int, typer.Option("--top", min=1, help="Rows of modules.")]


def estimate(
    target: TargetArgument,
    gpu: GpuOption = None,
    optimizer: OptimizerOption = "adamw",
    amp: AmpOption = "none",
    batch: BatchOption = None,
    length: LengthOption = None,
    settings: SetOption = None,
    devices: DevicesOption = None,
    output: OutputOption = None,
    top: TopOption = 10,
    scale: ScaleOption = "tiny",
    as_json: JsonOption = False,
) -> None:
    """Tell what a training step would need on a device, without running it; the model may be of any size."""
    check_folder(output)
    catalogue = known_devices(devices or ())
    if gpu is not None:
        find_device(gpu, catalogue)
    sizes = read_sizes(settings or (), batch=batch, length=length)
    subject = build_fakes(target, scale, "auto" if gpu is None else "cpu", sizes)
    with working(f"Estimating {target}"), runs_target(target):
        found = subject.estimate(DeviceRequest(optimizer, amp, gpu, tuple(devices or ())))
    if as_json:
        show_json(estimate_facts(found, target, catalogue.values(), top))
    else:
        show(*estimate_tables(found, target, catalogue.values(), top))
    if output is not None:
        found.profile.save(output)
        log(f"Wrote {output}")


def build_fakes(target: str, scale: str, device: str, sizes: Mapping[str, float]) -> TargetSubject:
    """The target on fake tensors, or really built where its factory needs values."""
    from remat.pytorch.estimate.building_fakes import builds_fakes

    zoo_device = device if ":" not in target else "auto"
    try:
        with builds_fakes():
            return open_subject(target, scale=scale, device=zoo_device, sizes=sizes)
    except UnknownName:
        raise
    except Exception as error:
        log(f"{target} cannot be built on fake tensors, so it is built in memory ({cause_of(error)})")
    return open_subject(target, scale=scale, device=zoo_device, sizes=sizes)
