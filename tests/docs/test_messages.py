"""The reference of errors and warnings has what the sources can say, no more and no less."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.docs.messages import FILLED_IN, WARNING, Message, messages_of, normalised

import remat
from remat import errors

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "messages.md"
SIGNALS = {"CaptureReady", "PlanReady", "SizesMatter"}
"""Raised and caught inside; nobody sees them."""
_ENTRY = re.compile(r"^- (`+) ?(.+?) ?\1 — (.+)$")


def documented() -> dict[Message, str]:
    """What the page says to do, by message; the heading above an entry is its kind."""
    found, kind = {}, ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            kind = WARNING if line == "## Warnings" else line[3:]
        elif entry := _ENTRY.match(line):
            found[Message(kind, normalised(entry[2]))] = entry[3]
    return found


@cache
def told() -> set[Message]:
    return {message for message in messages_of(ROOT / "src" / "remat") if message.kind not in SIGNALS}


def lines_of(messages: set[Message]) -> str:
    return "\n".join(f"{message.kind}: {message.text}" for message in sorted(messages))


def test_every_warning_and_error_is_in_the_reference() -> None:
    missing = told() - set(documented())
    assert not missing, f"Say in {PAGE.relative_to(ROOT)} what to do about:\n{lines_of(missing)}"


def test_reference_has_no_message_that_the_sources_lack() -> None:
    stale = set(documented()) - told()
    assert not stale, f"Nothing says any more:\n{lines_of(stale)}"


def test_every_message_comes_with_what_to_do() -> None:
    assert [text for text in documented().values() if len(text.split()) < 3] == []


def test_every_public_error_has_a_section() -> None:
    public = {name for name in remat.__all__ if isinstance(vars(errors).get(name), type)}
    headings = set(re.findall(r"^## (\w+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert len(public) > 10 and public <= headings


def test_few_messages_are_put_together_beyond_reading() -> None:
    assert sum(message.text == FILLED_IN for message in told()) <= 2


def test_reader_follows_names_choices_and_functions(tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text(
        """
import warnings
HELP = "ask for more"
class Known(RematError): pass
def word(x):
    return f"Low by {x}" if x else "Low"
def check(x, path):
    what = "floor" if x else "peak"
    message = f"Under the {what} of {x}; {HELP}."
    if path:
        raise Known(word(x) + f" in {path}")
    warnings.warn(f"{x}{path} is odd: " "look", stacklevel=2)
    return Known(message)
"""
    )
    assert messages_of(tmp_path) == {
        Message("Known", "Under the floor of …; ask for more."),
        Message("Known", "Under the peak of …; ask for more."),
        Message("Known", "Low by … in …"),
        Message("Known", "Low in …"),
        Message(WARNING, "… is odd: look"),
    }
