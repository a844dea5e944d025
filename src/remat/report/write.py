"""Where reports are written: one function, and the list of formats.

In: plans, profiles and curves. Out: a file whose name says what it is; `kind` says it where the name does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from remat.errors import MissingExtra, UnknownName
from remat.report.contents.gathered import Report, Source, gather
from remat.report.facts import write_facts
from remat.report.html import write_html
from remat.report.pictures.steps import draw_report
from remat.report.snapshot import write_snapshot
from remat.report.trace import write_trace


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    suffix: str
    writer: Callable[[Report, Path], Path]
    needs: tuple[str, ...] = ()
    """Libraries of the `report` extra."""
    shows_curves: bool = True

    def write(self, report: Report, path: Path) -> Path:
        if not report.steps and not self.shows_curves:
            raise UnknownName(f"A {self.name} shows a step, and a Pareto curve is none; add a plan or a profile.")
        return self.writer(report, path)


FORMATS = (
    Format("html", ".html", write_html, ("jinja2", "plotly")),
    Format("png", ".png", draw_report, ("matplotlib",)),
    Format("svg", ".svg", draw_report, ("matplotlib",)),
    # Longer suffixes stand before those they end in.
    Format("trace", ".trace.json", write_trace, shows_curves=False),
    Format("json", ".json", write_facts),
    Format("snapshot", ".pickle", write_snapshot, shows_curves=False),
)


def write_report(path: str | Path, *sources: Source, name: str = "", kind: str = "") -> Path:
    """Write one report of a plan, one or two profiles (before and after), a curve, or several of these.

    The file's suffix says how: .html, .png, .svg, .json, .trace.json (Perfetto) or .pickle (memory_viz).
    """
    path = Path(path)
    return find_format(path, kind).write(gather(*sources, name=name), path)


def find_format(path: Path, kind: str = "") -> Format:
    """The format called `kind`, or the one that the file's name asks for; refused where a library is missing."""
    found = [form for form in FORMATS if (form.name == kind if kind else path.name.endswith(form.suffix))]
    if found:
        missing = [module for module in found[0].needs if find_spec(module) is None]
        if missing:
            raise MissingExtra(f"A {found[0].name} report needs {' and '.join(missing)}; install `remat[report]`.")
        return found[0]
    if kind:
        raise UnknownName(f"No report format is called {kind!r}; choose one of {', '.join(f.name for f in FORMATS)}.")
    endings = ", ".join(form.suffix for form in FORMATS)
    raise UnknownName(f"Cannot tell from the name {path.name} what to write; let it end in one of {endings}.")
