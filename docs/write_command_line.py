"""Write the reference of the command line from the commands themselves.

    python docs/write_command_line.py          # or: make docs-pages

In: the typer application. Out: `docs/reference/command-line.md`, whose words before the marker are written by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from remat.cli import app

PAGE = Path(__file__).parent / "reference" / "command-line.md"
MARKER = "<!-- commands: made by docs/write_command_line.py -->\n"


def fill(page: str) -> str:
    """The page with everything after its marker made anew."""
    head, marker, _ = page.partition(MARKER)
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return head + marker + "".join(section(name, command) for name, command in commands.items())


def section(name: str, command: Any) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    usage = " ".join(["remat", name, "[OPTIONS]", *(_placeholder(argument) for argument in arguments)])
    lines = [f"\n## remat {name}\n", f"{' '.join(command.help.split())}\n", f"    {usage}\n"]
    lines += ["| | default | |", "|---|---|---|", *(row for parameter in command.params for row in rows(parameter))]
    return "\n".join(lines) + "\n"


def rows(parameter: Any) -> Iterator[str]:
    is_argument = parameter.param_type_name == "argument"
    names = [_placeholder(parameter)] if is_argument else sorted(parameter.opts, key=len, reverse=True)
    code = ", ".join(f"`{name}`" for name in names).replace("|", "\\|")
    help_text = " ".join((parameter.help or "").split()).replace("|", "\\|")
    yield f"| {code} | {_default(parameter)} | {help_text} |"


def _placeholder(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper()).strip("{}")


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    shown = parameter.show_default if isinstance(getattr(parameter, "show_default", None), str) else parameter.default
    shown = getattr(shown, "value", shown)
    is_empty = shown is None or shown is False or shown in ("", (), [])
    return "" if is_empty or callable(shown) else f"`{shown}`"


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
