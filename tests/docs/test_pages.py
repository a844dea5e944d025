"""Readers find their way: links lead somewhere, the README is short, and a newcomer's questions are two clicks away."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.docs.pages import DOCS, PAGES, ROOT, anchors_of, blocks_of, links_of, name_of

README = ROOT / "README.md"
LINKED = (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md")
MOST_LINES, MOST_WORDS = 120, 900
QUESTIONS = {
    "What do I type for my Hugging Face model?": ("docs/how-to/hugging-face.md", r"remat\.optimize\(model, "),
    "Why was my budget refused?": ("docs/faq.md", r"(?m)^## Why was my budget refused\?$"),
    "What does the gap mean?": ("docs/faq.md", r"(?m)^## What does the gap mean\?$"),
    "How do I add a solver?": ("docs/how-to/add-a-solver.md", r"CONTRIBUTING\.md#add-a-solver"),
    "Which file decides what is recomputed under torch.compile?": ("docs/architecture.md", r"`[\w/]*partition\w*\.py`"),
}
CLICKS = 2


def reachable(page: Path, clicks: int) -> set[Path]:
    pages = {page}
    for _ in range(clicks):
        pages |= {target for at in pages if at.suffix == ".md" for target, _ in links_of(at) if target.exists()}
    return pages


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    broken = []
    for target, anchor in links_of(page):
        is_there = target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors_of(target))
        broken += [] if is_there else [f"{target}#{anchor}"]
    assert broken == []


def test_readme_can_be_read_in_a_minute() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert len(text.split()) <= MOST_WORDS


def test_readme_has_a_picture_a_chart_a_table_and_four_limits() -> None:
    text = README.read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert len(pictures) == 2 and all((ROOT / picture).stat().st_size > 1000 for picture in pictures)
    limits = text.partition("## Limits\n")[2].partition("\n## ")[0]
    assert len(re.findall(r"^- ", limits, re.MULTILINE)) == 4
    how = text.partition("## How it works\n")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\d\. ", how, re.MULTILINE)) == 5


@pytest.mark.parametrize("question", QUESTIONS)
def test_newcomers_question_is_answered_two_clicks_from_the_readme(question: str) -> None:
    page, answer = QUESTIONS[question]
    assert ROOT / page in reachable(README, CLICKS)
    assert re.search(answer, (ROOT / page).read_text(encoding="utf-8"))


def test_file_that_decides_under_torch_compile_exists() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`(?:[\w]+/)*(partition\w*\.py)`", text)
    assert named and all(list((ROOT / "src" / "remat").rglob(name)) for name in named)


def test_every_page_is_reachable_from_the_readme() -> None:
    lost = {page for page in PAGES if page.name != "index.md"} - reachable(README, 3)
    assert {name_of(page) for page in lost} == set()


def test_pages_name_files_of_the_sources_in_the_architecture_alone() -> None:
    named = {
        name_of(page): found
        for page in PAGES
        if page.name != "architecture.md"
        for found in re.findall(r"`(?!benchmarks/|docs/|tests/)[a-z_]+/[a-z_/]+\.py`", page.read_text(encoding="utf-8"))
    }
    assert named == {}


def test_a_block_is_read_with_its_language_marker_and_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n\n<!-- setup\nx = 1\n-->\n```python no-run: needs a card\ny\n```\n[a](b.md#c)\n")
    setup, block = blocks_of(page)
    assert (setup.language, setup.marker, setup.text) == ("python", "setup", "x = 1\n")
    assert (block.marker, block.text, block.line) == ("no-run: needs a card", "y\n", 7)
    assert links_of(page) == [(tmp_path / "b.md", "c")]
    assert anchors_of(page) == {"one"}
