"""`remat fit`: a model and some GPUs in, the best way to train it there out, with every lever there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from remat.cli.estimate import DevicesOption, LengthOption, SetOption, build_fakes
from remat.cli.options import JsonOption, ScaleOption, TargetArgument
from remat.cli.request import check_folder
from remat.cli.subjects import TargetSubject
from remat.cli.target import is_in_zoo, read_sizes, runs_target
from remat.cli.terminal.console import log, show, show_json, working
from remat.core.budget import BudgetUnit, parse_budget
from remat.errors import BudgetError, RematError
from remat.report.tables.fit import fit_chart, fit_sheet

if TYPE_CHECKING:
    from remat.fit.levers import Levers
    from remat.fit.outcomes import Traces
    from remat.fit.search import LeverSearch
    from remat.zoo import Example

GpuOption = Annotated[str, typer.Option("--gpu", metavar="NAME", help="A device of the catalogue, as H100-80GB.")]
GpusOption = Annotated[int, typer.Option("--gpus", help="How many of them.")]
WholeBatchOption = Annotated[
    int | None, typer.Option("--batch", min=1, help="Samples of one step of the whole job.", show_default=False)
]
AllowOption = Annotated[
    str | None,
    typer.Option(
        "--allow",
        metavar="A,B",
        help="Levers that may be pulled: fp16, bf16, pure-bf16, recompute, offload, offload-activations, zero, "
        "accumulate, pipeline; all but offload-activations and pipeline if left out.",
        show_default=False,
    ),
]
KindOption = Annotated[str, typer.Option("--optimizer", help="sgd, momentum, adamw or adamw-without-masters.")]
LinkOption = Annotated[
    str | None,
    typer.Option("--link", help="Between GPUs of one machine, as NVLink4; the GPU's usual one if left out."),
]
BetweenOption = Annotated[str, typer.Option("--between", help="Between machines, as InfiniBand-400 or Ethernet-100.")]
LinksOption = Annotated[
    list[Path] | None,
    typer.Option("--links", metavar="FILE", help="A file that describes more links; may be given often."),
]
MemoryOption = Annotated[
    str | None, typer.Option("--memory", help='What of each GPU may be used, as "24GiB".', show_default=False)
]
GrowOption = Annotated[
    str | None,
    typer.Option(
        "--grow",
        metavar="WHAT",
        help="Find the largest that trains: layers, width, batch or sequence.",
        show_default=False,
    ),
]
PageOption = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Write a page: .html.", show_default=False)
]
ExportOption = Annotated[
    tuple[str, Path] | None,
    typer.Option(
        "--export",
        metavar="KIND PATH",
        help="Write the winner as a script, or for deepspeed, accelerate or trainer.",
        show_default=False,
    ),
]


def fit(
    target: TargetArgument,
    gpu: GpuOption,
    gpus: GpusOption = 1,
    batch: WholeBatchOption = None,
    allow: AllowOption = None,
    optimizer: KindOption = "adamw",
    grow: GrowOption = None,
    memory: MemoryOption = None,
    link: LinkOption = None,
    between: BetweenOption = "InfiniBand-400",
    length: LengthOption = None,
    settings: SetOption = None,
    devices: DevicesOption = None,
    links: LinksOption = None,
    report: PageOption = None,
    export: ExportOption = None,
    scale: ScaleOption = "tiny",
    as_json: JsonOption = False,
) -> None:
    """Find the fastest way to train a model on these GPUs, with every lever there is."""
    check_export(export, grow)
    check_folder(report)
    check_html(report)
    sizes = read_sizes(settings or (), length=length)
    options: dict[str, Any] = dict(
        gpu=gpu,
        gpus=gpus,
        batch=batch,
        allow=allow,
        optimizer=optimizer,
        link=link,
        between=between,
        memory=read_memory(memory),
        devices=tuple(devices or ()),
        links=tuple(links or ()),
    )
    check_names(options)
    if grow is not None:
        _grow(target, scale, sizes, grow, options, as_json)
        return
    example = example_of_target(target, scale, sizes)
    with working(f"Fitting {target}"), runs_target(target):
        from remat.fit.found import fit as find

        found = find(example.model, *example.args, **options, **example.kwargs)
    sheet = found.sheet()
    if as_json:
        show_json(asdict(sheet) | {"levers": asdict(found.levers), "seconds": found.found.seconds})
    else:
        show(fit_sheet(sheet).as_table(), Text(fit_chart(sheet)), Text(found.explain()))
    if report is not None:
        found.to_html(report)
        log(f"Wrote {report}")
    if export is not None:
        _export(found.levers, export, target, scale, sizes)


def check_names(options: dict[str, Any]) -> None:
    """Refuse unknown names before anything is built."""
    from remat.fit.cluster import find_cluster
    from remat.fit.found import allowed_levers, optimizer_kind
    from remat.fit.levers import accumulation_for

    optimizer_kind(options["optimizer"])
    allowed_levers(options["allow"])
    find_cluster(
        options["gpu"],
        options["gpus"],
        link=options["link"],
        between=options["between"],
        devices=options["devices"],
        links=options["links"],
    )
    if options["batch"] is not None:
        accumulation_for(options["batch"], 1, options["gpus"])


def check_export(export: tuple[str, Path] | None, grow: str | None) -> None:
    """Refuse what cannot be written before anything is searched."""
    from remat.fit.export import check_kind

    if export is None:
        return
    check_kind(export[0])
    check_folder(export[1])
    if grow is not None:
        raise RematError("--grow finds a size, and no combination to export; run fit again with that size.")


def _export(
    levers: Levers, export: tuple[str, Path], target: str, scale: str, sizes: Mapping[str, float | str]
) -> None:
    from remat.fit.export import export as write

    known = {"scale": scale, **sizes} if is_in_zoo(target) else sizes
    exported = write(levers, export[0], export[1], target=target, sizes=known)
    log(f"Wrote {export[1]}")
    for note in exported.notes:
        log(note)


def check_html(report: Path | None) -> None:
    if report is not None and report.suffix != ".html":
        raise RematError(f"Combinations are shown on a page, and {report.name} is none; let it end in .html.")


def read_memory(memory: str | None) -> int | None:
    if memory is None:
        return None
    found = parse_budget(memory)
    if found.unit is not BudgetUnit.BYTES:
        raise BudgetError(f'The memory of a GPU is in bytes, not {memory!r}; write "24GiB".')
    return int(found.amount)


def example_of_target(target: str, scale: str, sizes: dict[str, float], *, real: bool = False) -> Example:
    """The target's model and batch, on fake tensors unless it is to run."""
    from remat.cli.subjects import open_subject

    subject: TargetSubject = (
        open_subject(target, scale=scale, sizes=sizes) if real else build_fakes(target, scale, "cpu", sizes)
    )
    example: Example | None = getattr(subject, "example", None)
    if example is None:
        raise RematError(f"{target!r} is no PyTorch model, and levers are pulled for those alone; name another target.")
    return example


def _grow(target: str, scale: str, sizes: dict[str, float], axis: str, options: dict[str, Any], as_json: bool) -> None:
    from remat.fit.grow import check_growth, grow

    name = check_growth(axis)
    example = example_of_target(target, scale, sizes)
    start = _start(axis, example)
    traces: dict[int, Traces] = {}
    with working(f"Growing {target}"), runs_target(target):
        found = grow(
            axis, lambda size: _search_at(axis, name, size, target, scale, sizes, example, options, traces), start
        )
    if found is None:
        raise RematError(f"Not even the smallest {axis} of {target} trains on this; take more or larger GPUs.")
    if as_json:
        show_json({"axis": axis, "size": found.size, "parameters": found.parameters, "sentence": found.sentence})
    else:
        show(Text(found.sentence))


def _start(axis: str, example: Example) -> int:
    from remat.pytorch.explore.module_blocks import repeated_blocks
    from remat.pytorch.explore.resize import size_along

    if axis == "layers":
        return max(1, len(repeated_blocks(example.model)))
    if axis == "width":
        return next((int(item.shape[-1]) for item in example.model.parameters() if item.dim() > 1), 64)
    return size_along(example, "batch" if axis == "batch" else "length")


def _search_at(
    axis: str,
    name: str,
    size: int,
    target: str,
    scale: str,
    sizes: dict[str, float],
    example: Example,
    options: dict[str, Any],
    kept_traces: dict[int, Traces],
) -> LeverSearch:
    from remat.fit.cluster import find_cluster
    from remat.fit.found import allowed_levers, optimizer_kind
    from remat.fit.outcomes import Evaluator, Traces
    from remat.fit.search import LeverSearch

    if axis in ("width", "sequence"):
        example = example_of_target(target, scale, {**sizes, name: size})
    kept = {key: options[key] for key in ("link", "between", "devices", "links")}
    cluster = find_cluster(options["gpu"], options["gpus"], memory_bytes=options["memory"], **kept)
    traces = kept_traces.setdefault(
        size if axis in ("width", "sequence") else 0,
        Traces(example.model, example.args, example.kwargs, cluster.device.name, options["devices"]),
    )
    evaluator = Evaluator(traces, cluster, layers=size if axis == "layers" else None)
    batch = size * options["gpus"] if axis == "batch" else options["batch"]
    allowed = allowed_levers(options["allow"]) - ({"accumulate"} if axis == "batch" else frozenset())
    return LeverSearch(evaluator, optimizer_kind(options["optimizer"]), allowed, batch)
