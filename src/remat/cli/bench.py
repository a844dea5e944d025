"""`remat bench`: the classic experiments, rerun; tables and pictures in one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from remat.bench.suite import MODELS, Suite, make_suite
from remat.cli.options import DeviceOption, JsonOption, SeedOption
from remat.cli.target import choose_device
from remat.cli.terminal.console import log, show, show_json
from remat.cli.terminal.interrupt import Interrupt
from remat.cli.terminal.progress import parts
from remat.core.document import write_text
from remat.core.results.bench import Bench, encode_bench, save_bench
from remat.errors import RematError, UnknownName
from remat.report.pictures.picture import prepare_folder
from remat.report.tables.bench import bench_markdown, bench_sheets, remarks

_MODELS = ",".join(MODELS)
OutputOption = Annotated[Path, typer.Option("--output", "-o", help="Folder for tables and pictures.")]
ModelsOption = Annotated[str, typer.Option("--models", metavar="A,B", help="Zoo models to train.")]
BatchesOption = Annotated[
    str, typer.Option("--batches", metavar="N,M", help="Batch sizes; by default those that suit model and device.")
]
QuickOption = Annotated[bool, typer.Option("--quick", help="Smaller batches and less search: a first look.")]


def bench(
    output: OutputOption = Path("remat-bench"),
    device: DeviceOption = "auto",
    models: ModelsOption = _MODELS,
    batches: BatchesOption = "",
    quick: QuickOption = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Rerun the classic experiments: peak and time of every way to train, beside what is published."""
    device = choose_device(device)
    names = [name.strip() for name in models.split(",") if name.strip()]
    suite = make_suite(names, _batches(batches), device, quick=quick)
    prepare_folder(output)
    found = _run(suite, device, seed, output)
    if not found.experiments:
        raise RematError(" ".join(found.skipped))
    files = write_bench(found, output)
    if as_json:
        show_json({**encode_bench(found), "files": [str(path) for path in files]})
        return
    show(*(sheet.as_table() for sheet in bench_sheets(found)))
    show(*(Text(sentence) for sentence in remarks(found)))
    log(f"Wrote {len(files)} files to {output}")


def write_bench(found: Bench, folder: Path) -> list[Path]:
    """The facts, the tables and the pictures."""
    from remat.report.pictures.bench import draw_bench

    facts, tables = folder / "bench.json", folder / "bench.md"
    save_bench(found, facts)
    write_text(tables, bench_markdown(found))
    return [facts, tables, *draw_bench(found, folder)]


def _run(suite: Suite, device: str, seed: int, output: Path) -> Bench:
    from remat.bench.experiment import Audience, costs_measured_anew, run_bench
    from remat.solvers import get_solver

    interrupt = Interrupt()
    # Known to heed before the first solver is made, so that Ctrl-C is caught from the beginning.
    interrupt.heeded_by(get_solver("auto"))
    with interrupt.caught(log), parts("The classic experiments") as tell, costs_measured_anew():
        audience = Audience(
            tell=tell,
            keep=lambda bench: save_bench(bench, output / "bench.json"),
            stop=lambda: interrupt.asked,
            heeded_by=interrupt.heeded_by,
        )
        return run_bench(suite, device, seed, audience)


def _batches(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [0]
    if any(batch < 1 for batch in found):
        raise UnknownName(f"Cannot read the batches {text!r}; write whole numbers above 0, as 4,8,16.")
    return found
