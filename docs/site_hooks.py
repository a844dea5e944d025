"""What mkdocs is told beyond its settings: pages and pictures from outside docs/, and how links reach them.

In: Markdown whose links are right in the repository. Out: the same Markdown with links that are right in the site.
CONTRIBUTING.md, CHANGELOG.md and the list of benchmark suites become pages, benchmark pictures become images, and the
markers of code fences that tests read (`python no-run: …`) go.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "benchmarks/README.md": "suites.md"}
PICTURES = "benchmarks/results/"
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)(?=[)#])")
_MARKED_FENCE = re.compile(r"^(\s*```\w+) .*$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for picture in sorted((ROOT / PICTURES).glob("frontier_*.svg")):
        files.append(File.generated(config, f"images/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    here = page.file.src_uri
    return _MARKED_FENCE.sub(r"\1", _LINK.sub(lambda link: site_link(link[1], here), markdown))


def site_link(link: str, here: str) -> str:
    """The link of a page, whose path in the site is `here`, as the site has it."""
    sources = {page: source for source, page in ROOT_PAGES.items()}
    source = sources.get(here, f"docs/{here}")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return posixpath.relpath(site_path(target), posixpath.dirname(here) or ".")


def site_path(target: str) -> str:
    """A path of the repository as one of the site; what has no page stays a link that mkdocs complains of."""
    if target in ROOT_PAGES:
        return ROOT_PAGES[target]
    if target.startswith(PICTURES):
        return f"images/{posixpath.basename(target)}"
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
