"""The site builds without a warning, and opened from the file system it is complete, quiet and searchable."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.docs.pages import ROOT
from tests.support.browser import ARGUMENTS, find_chromium

pytest.importorskip("mkdocs", reason="needs mkdocs; install remat[docs]")
pytest.importorskip("material", reason="needs mkdocs-material; install remat[docs]")
pytest.importorskip("mkdocstrings", reason="needs mkdocstrings; install remat[docs]")

LOCAL = ("file:", "data:", "blob:", "about:")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The site's folder, and what mkdocs said."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(built: tuple[Path, str]) -> Path:
    return built[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright to drive a browser")
    if find_chromium() is None:
        pytest.skip("no chromium here; see `make browser`")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=find_chromium(), args=list(ARGUMENTS))
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A tab that writes down, in `page.noted`, what it asks of a network and what it complains of."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.noted = []
    note = opened.noted.append
    opened.on("request", lambda request: None if request.url.startswith(LOCAL) else note(f"asked for {request.url}"))
    opened.on("requestfailed", lambda request: note(f"failed: {request.url}"))
    opened.on("console", lambda message: note(message.text) if message.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: note(str(error)))
    yield opened
    context.close()


def test_site_builds_without_a_warning(built: tuple[Path, str]) -> None:
    site, said = built
    assert not re.search(r"WARNING|ERROR", said), said
    assert len(list(site.rglob("*.html"))) > 25


def test_no_page_names_a_foreign_script_style_or_font(site: Path) -> None:
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"']?(https?:)?//[^\"'\s>]+")
    found = {path.name: tags[0] for path in site.rglob("*.html") if (tags := loads.findall(path.read_text("utf-8")))}
    assert found == {}


def test_every_page_opens_from_the_file_system_without_a_complaint(site: Path, page: Any) -> None:
    pages = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    for path in pages:
        page.goto(path.as_uri())
        page.wait_for_selector("html.js", state="attached")
        assert page.noted == [], path.name
        assert page.locator("article h1").count() >= 1, path.name
        assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)"), path.name
    assert len(pages) > 25


@pytest.mark.parametrize(
    ("word", "expected"), [("InfeasibleBudget", "messages.html"), ("max_batch_size", "python.html")]
)
def test_search_finds_a_word_offline(site: Path, page: Any, word: str, expected: str) -> None:
    page.goto((site / "index.html").as_uri())
    page.click(".md-search__input")
    page.keyboard.type(word)
    page.wait_for_selector(".md-search-result__item", timeout=20_000)
    links = page.eval_on_selector_all(".md-search-result__item a", "links => links.map(link => link.href)")
    assert any(expected in link for link in links)
    page.locator(".md-search-result__item a").first.click()
    page.wait_for_url("**/*.html*")
    assert word in page.inner_text("article")
    assert page.noted == []


def test_site_follows_the_theme_of_the_system(site: Path, browser: Any) -> None:
    def background(scheme: str) -> str:
        with closing(browser.new_context(color_scheme=scheme)) as context:
            opened = context.new_page()
            opened.goto((site / "index.html").as_uri())
            opened.wait_for_selector("html.js", state="attached")
            return str(opened.evaluate("getComputedStyle(document.body).backgroundColor"))

    assert background("light") != background("dark")
