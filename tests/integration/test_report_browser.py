"""The report in a real browser: complete in itself, quiet, and usable by mouse, keyboard, touch and in both themes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.browser import ARGUMENTS, Opened, find_chromium, open_page
from tests.support.reports import PLAN, curve, large_plan, measured

from remat.report import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright to drive a browser")
pytest.importorskip("plotly")
pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no chromium here; see `make browser`")

NOTHING = replace(measured(), ops=(), storages=(), stopped_by="it raised before its first op.")
LARGEST_FILE = 6_000_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=find_chromium(), args=list(ARGUMENTS))
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("report") / "all.html", PLAN, curve(), name="small")


@pytest.fixture(scope="module")
def shared(browser: Any, path: Path) -> Iterator[Opened]:
    with open_page(browser, path) as opened:
        yield opened


def rows(page: Any) -> list[list[str]]:
    return page.eval_on_selector_all(
        "#table tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.innerText.trim()))"
    )


def point_at_memory(opened: Opened, across: float = 0.5) -> str:
    chart = opened.page.locator("#memory-chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    opened.page.mouse.move(box["x"] + across * box["width"], box["y"] + 120)
    opened.page.wait_for_selector("#memory-tip:not([hidden])")
    return opened.page.inner_text("#memory-tip")


def test_plan_and_curve_ask_for_nothing_and_complain_of_nothing(shared: Opened) -> None:
    assert (shared.requests, shared.complaints) == ([], [])
    assert shared.page.locator(".plot .main-svg").count() >= 3


@pytest.mark.parametrize(
    ("sources", "dark"),
    [((measured(),), True), ((measured(), measured()), False), ((curve(),), True), ((NOTHING,), False)],
    ids=["profile", "two profiles", "curve", "no ops"],
)
def test_page_asks_for_nothing_and_complains_of_nothing(
    browser: Any, tmp_path: Path, sources: tuple[Any, ...], dark: bool
) -> None:
    with open_page(browser, write_report(tmp_path / "a.html", *sources), dark=dark) as opened:
        charts = opened.page.locator(".plot .main-svg").count()
        assert (opened.requests, opened.complaints) == ([], [])
        assert charts > 0


def test_hover_tells_op_module_classes_and_largest_tensors(shared: Opened) -> None:
    text = point_at_memory(shared)
    for words in ("Plain PyTorch", "operator", "In memory", "activations", "Largest tensors in memory"):
        assert words in text
    assert re.search(r"layers\.\d", text)
    assert shared.page.locator("#memory-frame .cursor").is_visible()
    shared.page.mouse.move(5, 5)
    shared.page.wait_for_selector("#memory-tip", state="hidden")


def test_keyboard_walks_through_the_step_and_finds_the_peak(shared: Opened) -> None:
    shared.page.focus("#memory-frame")
    shared.page.keyboard.press("p")
    assert "peak" in shared.page.inner_text("#memory-tip")
    before = shared.page.inner_text("#memory-tip")
    shared.page.keyboard.press("ArrowRight")
    assert shared.page.inner_text("#memory-tip") != before
    shared.page.keyboard.press("ArrowDown")
    assert "With Remat" in shared.page.inner_text("#memory-tip")
    shared.page.keyboard.press("Escape")
    assert not shared.page.locator("#memory-tip").is_visible()


@pytest.mark.parametrize(
    ("chart", "mark"), [("#lifetimes-0", ".barlayer .point path"), ("#curve-chart", ".points path")]
)
def test_bars_and_points_tell_what_they_are(shared: Opened, chart: str, mark: str) -> None:
    shared.page.locator(chart).scroll_into_view_if_needed()
    box = max(
        (found.bounding_box() for found in shared.page.locator(f"{chart} {mark}").all()), key=lambda box: box["width"]
    )
    shared.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = shared.page.locator(f"{chart} ~ .tip")
    tip.wait_for(state="visible")
    assert re.search(r"\d (B|KiB|MiB)", tip.inner_text())


def test_table_search_and_sort(shared: Opened) -> None:
    page = shared.page
    everything = rows(page)
    page.fill("#search", "layers.1")
    assert {row[0] for row in rows(page)} == {"layers.1"}
    page.fill("#search", "no such module")
    assert rows(page) == [] and page.inner_text("#count").startswith("0 of")
    page.fill("#search", "")
    assert rows(page) == everything
    heading = page.locator("#table th", has_text="Extra time")
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    assert rows(page)[0][5] == max((row[5] for row in everything), key=lambda cell: float(cell.split()[0]))
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert rows(page)[-1][5] == max((row[5] for row in everything), key=lambda cell: float(cell.split()[0]))


def test_theme_follows_the_system_and_the_button(shared: Opened) -> None:
    def background() -> str:
        return shared.page.evaluate("getComputedStyle(document.body).backgroundColor")

    day = background()
    shared.page.emulate_media(color_scheme="dark")
    night = background()
    assert day != night
    shared.page.click("#theme")
    assert background() == day
    shared.page.emulate_media(color_scheme="light")
    shared.page.click("#theme")
    assert background() == night
    shared.page.wait_for_timeout(300)
    shared.page.click("#theme")
    assert background() == day
    assert shared.complaints == []


def test_phone_needs_no_sideways_scroll(browser: Any, path: Path) -> None:
    with open_page(browser, path, phone=True, dark=True) as opened:
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 375
        chart = opened.page.locator("#memory-chart")
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        opened.page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + 100)
        opened.page.wait_for_selector("#memory-tip:not([hidden])")
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 375
        assert opened.complaints == []


def test_five_thousand_ops_open(browser: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = large_plan()
    assert len(plan.problem.graph.ops) > 5000
    path = write_report(tmp_path / "large.html", plan, curve())
    assert path.stat().st_size < LARGEST_FILE
    with open_page(browser, path) as opened:
        with capsys.disabled():
            print(f"\n5,000 ops: first chart after {opened.drawn_ms} ms, all after {opened.complete_ms} ms")
        assert (opened.requests, opened.complaints) == ([], [])
        assert "operator" in point_at_memory(opened)
