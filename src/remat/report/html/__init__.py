"""The report as one HTML file that needs nothing else: words, charts and a table, in light and dark.

In: a `Report`. Out: a file with its data, its style, its script and plotly's own script inside; nothing is fetched when
it is opened, and a content policy in the file forbids it. `page.html` is the frame, `page.css` the looks, `page.js` the
charts.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from remat.core.document import write_text
from remat.errors import MissingExtra
from remat.report.contents.decisions import decisions
from remat.report.contents.details import details
from remat.report.contents.gathered import Report
from remat.report.contents.palette import CLASS_INK, PHASE_INK, slug
from remat.report.contents.summary import summarize
from remat.report.html.data import page_data

_NEEDS = "HTML reports are made with jinja2 and plotly; install `remat[report]`."


def write_html(report: Report, path: Path) -> Path:
    write_text(path, render(report))
    return path


def render(report: Report) -> str:
    """The whole page as text."""
    template, mark, plotly = _libraries()
    from remat import __version__

    return str(
        template.render(
            name=report.name,
            summary=summarize(report),
            steps=[title for title, _ in report.steps],
            measured=[not step.is_estimate for _, step in report.steps],
            has_plan=report.plan is not None and report.plan.schedule is not None,
            pareto=report.pareto,
            table=decisions(report),
            details=details(report),
            classes=[(kind.value, slug(kind.value), ink) for kind, ink in CLASS_INK.items()],
            phases=[(phase.value, slug(phase.value), ink) for phase, ink in PHASE_INK.items()],
            version=__version__,
            data=mark(_embedded(page_data(report))),
            style=mark(_file("page.css")),
            script=mark(_file("page.js")),
            plotly=mark(plotly),
        )
    )


def _libraries() -> tuple[Any, Any, str]:
    """The compiled page, what marks text as safe, and plotly's script from its wheel."""
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtra(_NEEDS) from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_file("page.html")), Markup, get_plotlyjs()


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _embedded(data: dict[str, object]) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
