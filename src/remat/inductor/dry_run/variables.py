"""What a wrapper's variables are: which call computes each, which are new names of others, where they come from.

In: the function definitions of a wrapper and its lines. Out: a `Variables`, read from the text alone. Inductor gives
every buffer a name of its own, so a name stands for one value: memory that changes hands gets a new name
(`buf7 = buf3; del buf3  # reuse`), and the first call that mentions a name is the one that computes it.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_ORIGINS = re.compile(r"\s*# (?:Topologically Sorted|Unsorted) Source Nodes: \[([^\]]*)\]")
_NAME = re.compile(r"[A-Za-z_]\w*")
_NOT_CALLS = (
    "assert_size_stride",
    "assert_alignment",
    "reinterpret_tensor",
    "get_raw_stream",
    "run_intermediate_hooks",
)


@dataclass(frozen=True, slots=True)
class Maker:
    """The call that computes a variable."""

    call: str
    origins: tuple[str, ...]


_NOBODY = Maker("", ())


@dataclass(frozen=True, slots=True)
class Variables:
    """Of one wrapper; functions are named by their `def`."""

    targets: Mapping[tuple[str, int], str]
    """The variable that a line of a function assigns."""
    makers: Mapping[tuple[str, str], Maker]
    renames: Mapping[tuple[str, str], Sequence[tuple[int, str]]]
    """For an expression, as `buf3` or `buf5[0]`: the lines that give it a new name, and the name."""
    origins: Mapping[tuple[str, int], tuple[str, ...]]
    """Of the call at a line of a function."""
    parameters: Sequence[str]
    """What the wrapper's `call` takes, by name."""

    def name_at(self, function: str, name: str, line: float) -> str:
        """The latest name, at `line`, of what was once called `name`."""
        later = [item for item in self.renames.get((function, name), ()) if item[0] <= line]
        return self.name_at(function, later[-1][1], line) if later else name

    def maker(self, function: str, name: str) -> Maker:
        return self.makers.get((function, name), self.makers.get((function, name.partition("[")[0]), _NOBODY))


def read_variables(functions: Sequence[ast.FunctionDef], lines: Sequence[str]) -> Variables:
    reader = _Reader(lines)
    for function in functions:
        reader.read(function)
    return Variables(reader.targets, reader.makers, dict(reader.renames), reader.origins, reader.parameters)


class _Reader:
    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines
        self._wholes: dict[tuple[str, str], str] = {}
        """The buffer that a variable is a view of."""
        self.targets: dict[tuple[str, int], str] = {}
        self.makers: dict[tuple[str, str], Maker] = {}
        self.renames: defaultdict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
        self.origins: dict[tuple[str, int], tuple[str, ...]] = {}
        self.parameters: list[str] = []

    def read(self, function: ast.FunctionDef) -> None:
        above = function.lineno
        for statement in _statements(function.body):
            value = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if isinstance(target, ast.Name):
                self.targets[function.name, statement.lineno] = target.id
            if isinstance(value, ast.Name) and value.id == "args" and isinstance(target, ast.Tuple):
                self._read_parameters(function.name, target)
            elif isinstance(value, ast.Call) and _is_call(value):
                self._read_call(function.name, value, above)
                above = statement.end_lineno or statement.lineno
            elif isinstance(target, ast.Name) and value is not None:
                self._read_rename(function.name, statement.lineno, target.id, value)

    def _read_parameters(self, function: str, target: ast.Tuple) -> None:
        names = [ast.unparse(item) for item in target.elts]
        for name in names:
            self.makers[function, name] = _NOBODY
        if function == "call":
            self.parameters = names

    def _read_call(self, function: str, value: ast.Call, above: int) -> None:
        origins = self._origins_between(above, value.lineno)
        self.origins[function, value.lineno] = origins
        maker = Maker(call_name(value), origins)
        mentioned = set(_NAME.findall(" ".join(self._lines[value.lineno - 1 : value.end_lineno])))
        # Who writes to a part of a buffer writes to the buffer.
        for name in mentioned | {
            self._wholes[function, name] for name in mentioned if (function, name) in self._wholes
        }:
            self.makers.setdefault((function, name), maker)

    def _read_rename(self, function: str, line: int, target: str, value: ast.expr) -> None:
        source = _viewed(value)
        if isinstance(value, ast.Subscript) and source is not None:
            self.renames[function, source].append((line, target))
            self.makers[function, target] = self.makers.get((function, source.partition("[")[0]), _NOBODY)
        elif source is not None and self._lines[line - 1].rstrip().endswith("# reuse"):
            self.renames[function, source].append((line, target))
        elif source is not None:
            self._wholes[function, target] = source

    def _origins_between(self, above: int, line: int) -> tuple[str, ...]:
        for text in reversed(self._lines[above : line - 1]):
            found = _ORIGINS.match(text)
            if found:
                return tuple(name for name in found[1].split(", ") if name)
        return ()


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """In the order of the text, those in blocks included."""
    for statement in body:
        yield statement
        for inner in (getattr(statement, "body", ()), getattr(statement, "orelse", ())):
            yield from _statements(inner)


def _is_call(value: ast.Call) -> bool:
    """Whether this computes something, rather than making room, looking at it or checking it."""
    name = _dotted(value.func)
    return not (name in _NOT_CALLS or "empty_strided" in name or name.endswith(("as_strided", "view.dtype", ".clear")))


def call_name(value: ast.Call) -> str:
    """`kernel` for `kernel.run(...)`; the name of an op without `torch.ops.`; a method's own name."""
    return _dotted(value.func).removeprefix("torch.ops.").removesuffix(".run")


def _dotted(value: ast.expr) -> str:
    """`a.b.c`; of what is no name only the attributes."""
    parts: list[str] = []
    while isinstance(value, ast.Attribute):
        parts.append(value.attr)
        value = value.value
    return ".".join(reversed([*parts, value.id] if isinstance(value, ast.Name) else parts[:1]))


def _viewed(value: ast.expr) -> str | None:
    """The variable, or the place in one, that an expression without computation looks at."""
    if isinstance(value, ast.Name | ast.Subscript):
        return ast.unparse(value)
    if isinstance(value, ast.Call) and not _is_call(value) and "empty_strided" not in _dotted(value.func):
        return _viewed(value.args[0]) if value.args else None
    return None
