"""The pages of the documentation, and what is marked in them: code blocks and links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
_BLOCK = re.compile(
    r"^<!-- (?P<setup>setup)\n(?P<hidden>.*?)^-->$|^```(?P<info>[^\n`]+)\n(?P<shown>.*?)^```$", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*)\)")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, or a hidden one that sets the page's scene."""

    language: str
    marker: str
    """What stands behind the language: "runnable", "no-run: why", or nothing."""
    text: str
    line: int


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        language, _, marker = "python setup".partition(" ") if match["setup"] else match["info"].partition(" ")
        body = match["hidden"] if match["setup"] else match["shown"]
        found.append(Block(language, marker, body, text.count("\n", 0, match.start()) + 2))
    return found


def links_of(page: Path) -> list[tuple[Path, str]]:
    """Files that a page links to, each with the anchor in it."""
    prose = _FENCED.sub("", page.read_text(encoding="utf-8"))
    found = []
    for link in _LINK.findall(prose):
        path, _, anchor = link.partition("#")
        found.append(((page.parent / path).resolve() if path else page, anchor))
    return found


def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and mkdocs make them."""
    prose = _FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}
