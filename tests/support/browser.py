"""A real browser for tests: Debian's or another Chromium on this machine, driven without a network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

PATIENCE_MS = 240_000
"""A page with everything takes half a minute on a slow machine that has other tests to run."""


def find_chromium() -> str | None:
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@dataclass(slots=True)
class Opened:
    """A page and what it did that it should not."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @property
    def drawn_ms(self) -> int:
        """From the start of loading until the first chart is there."""
        return int(self.page.evaluate("document.documentElement.dataset.drawn"))

    @property
    def complete_ms(self) -> int:
        return int(self.page.evaluate("document.documentElement.dataset.complete"))


@contextmanager
def open_page(browser: Any, path: Path, *, dark: bool = False, phone: bool = False) -> Iterator[Opened]:
    """Open a report and wait for its charts; every request but the file itself is written down."""
    size = {"width": 375, "height": 812} if phone else {"width": 1280, "height": 900}
    context = browser.new_context(
        viewport=size, color_scheme="dark" if dark else "light", is_mobile=phone, has_touch=phone
    )
    try:
        opened = Opened(context.new_page())
        address = path.resolve().as_uri()
        note = opened.complaints.append
        opened.page.on(
            "request", lambda request: opened.requests.append(request.url) if request.url != address else None
        )
        opened.page.on("console", lambda message: note(message.text) if message.type in ("error", "warning") else None)
        opened.page.on("pageerror", lambda error: note(str(error)))
        opened.page.goto(address, timeout=PATIENCE_MS)
        opened.page.wait_for_selector("html[data-complete]", timeout=PATIENCE_MS)
        yield opened
    finally:
        context.close()
