"""`remat report`: files of plans, profiles and curves in, one report out, as a page, a picture, a trace or numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from remat.cli.options import JsonOption
from remat.cli.request import check_folder
from remat.cli.terminal.console import log, show, show_json
from remat.core.garbage import collecting_only_what_is_new
from remat.errors import UnknownName
from remat.report.contents.gathered import gather
from remat.report.contents.summary import Summary, summarize
from remat.report.sources import load_source
from remat.report.write import FORMATS, find_format

FilesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="A plan, a profile (two: before and after) or a Pareto curve, or several of these.",
        show_default=False,
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="What to write: .html, .png, .svg, .json, .trace.json (Perfetto) or .pickle (memory_viz).",
        show_default="FILE with its ending changed",
    ),
]
FormatOption = Annotated[
    str, typer.Option("--format", help=f"{', '.join(form.name for form in FORMATS)}; html without an output.")
]
NameOption = Annotated[str, typer.Option("--name", help="What the report calls the step.", show_default=False)]


@collecting_only_what_is_new()
def report(
    files: FilesArgument,
    output: OutputOption = None,
    form: FormatOption = "",
    name: NameOption = "",
    as_json: JsonOption = False,
) -> None:
    """Make one report of plans, profiles and curves: what fills memory, what is done about it, what it costs."""
    path = output if output is not None else _beside(files[0], form or "html")
    chosen = find_format(path, form)
    check_folder(path)
    if any(path.resolve() == file.resolve() for file in files):
        raise UnknownName(
            f"The report would overwrite {path}, which it is made from; choose another name with --output."
        )
    made = gather(*map(load_source, files), name=name, otherwise=files[0].stem)
    chosen.write(made, path)
    summary = summarize(made)
    if as_json:
        show_json(
            {"report": str(path), "format": chosen.name, "bytes": path.stat().st_size, "headline": summary.headline}
        )
    else:
        _show(summary)
    log(f"Wrote {path}")


def _beside(file: Path, form: str) -> Path:
    suffix = find_format(Path(), form).suffix
    return file.with_name(f"{file.stem}{'.report' if suffix == '.json' else ''}{suffix}")


def _show(summary: Summary) -> None:
    show(Text(summary.headline, style="bold"))
    for answer in summary.answers:
        show(Padding(Text.assemble((f"{answer.title}. ", "bold"), answer.text), (1, 0, 0, 2)))
