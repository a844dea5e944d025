"""What Remat can tell a user: the sources in, every message of a warning or error out, as a template.

Read from syntax trees, and known by their words alone, so that code can move between files. What an f-string fills in
is `…`. Names, joined strings, choices and functions that only return words are followed; what is put together in
another way comes out as `…` alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FILLED_IN = "…"
WARNING = "warning"
_MOST_VARIANTS = 12


@dataclass(frozen=True, slots=True, order=True)
class Message:
    kind: str
    """A class of errors, or "warning"."""
    text: str


def messages_of(package: Path) -> set[Message]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))]
    kinds = error_kinds(trees)
    shared = {name: value for tree in trees for name, value in _module_constants(tree).items()}
    return {message for tree in trees for message in _messages(tree, kinds, shared)}


def error_kinds(trees: list[ast.Module]) -> set[str]:
    """`RematError` and every class built on it, however far; and torch's own, which Remat raises in its place."""
    parents = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    kinds = {"RematError", "RuntimeError"}
    while grown := {name for name, bases in parents.items() if bases & kinds} - kinds:
        kinds |= grown
    return kinds


def _messages(tree: ast.Module, kinds: set[str], shared: Mapping[str, ast.expr]) -> Iterator[Message]:
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for scope in _scopes(tree):
        reader = _Reader({**shared, **_module_constants(tree)}, functions, _assigned(scope))
        for call in _own_nodes(scope):
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name = ast.unparse(call.func)
            kind = WARNING if name in ("warnings.warn", "warn") else name.rsplit(".", 1)[-1]
            if kind == WARNING or kind in kinds:
                yield from (Message(kind, normalised(text)) for text in reader.texts(call.args[0]))


def normalised(text: str) -> str:
    """One line; neighbouring fillings are one, so that how a sentence is put together does not matter."""
    return re.sub(rf"{FILLED_IN}(?:{FILLED_IN})+", FILLED_IN, " ".join(text.split()))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Which texts an expression can be."""

    constants: Mapping[str, ast.expr]
    functions: Mapping[str, ast.FunctionDef]
    local: Mapping[str, tuple[ast.expr, ...]]

    def texts(self, node: ast.expr, depth: int = 0) -> tuple[str, ...]:
        if depth > 6:
            return (FILLED_IN,)
        found = tuple(dict.fromkeys(self._texts(node, depth + 1)))
        return found if 0 < len(found) <= _MOST_VARIANTS else (FILLED_IN,)

    def _texts(self, node: ast.expr, depth: int) -> Iterator[str]:
        match node:
            case ast.Constant(value=str() as text):
                yield text
            case ast.JoinedStr(values=parts):
                yield from self._joined(parts, depth)
            case ast.FormattedValue(value=value):
                yield from self._filling(value, depth)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                yield from (a + b for a in self.texts(left, depth) for b in self.texts(right, depth))
            case ast.IfExp(body=body, orelse=orelse):
                yield from (*self.texts(body, depth), *self.texts(orelse, depth))
            case ast.Name(id=name) if name in self.local:
                yield from (text for value in self.local[name] for text in self.texts(value, depth))
            case ast.Name(id=name) if name in self.constants:
                yield from self.texts(self.constants[name], depth)
            case ast.Call(func=ast.Name(id=name)) if name in self.functions:
                yield from self._returned(self.functions[name], depth)
            case _:
                yield FILLED_IN

    def _joined(self, parts: list[ast.expr], depth: int) -> Iterator[str]:
        texts = [""]
        for part in parts:
            texts = [head + tail for head in texts for tail in self.texts(part, depth)]
        yield from texts

    def _filling(self, value: ast.expr, depth: int) -> Iterator[str]:
        """Constants and choices between words belong to the sentence; everything else is filled in."""
        name = value.id if isinstance(value, ast.Name) else ""
        values = self.local.get(name, ())
        is_words = all(map(_is_words, values)) if values else name in self.constants
        yield from self.texts(value, depth) if is_words else (FILLED_IN,)

    def _returned(self, function: ast.FunctionDef, depth: int) -> Iterator[str]:
        inner = _Reader(self.constants, self.functions, _assigned(function))
        for node in _own_nodes(function):
            if isinstance(node, ast.Return) and node.value is not None:
                yield from inner.texts(node.value, depth)


def _is_words(node: ast.expr) -> bool:
    if isinstance(node, ast.IfExp):
        return _is_words(node.body) and _is_words(node.orelse)
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _module_constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Texts that a module gives a name in capitals."""
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Constant, ast.JoinedStr))
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper() and _is_text(node.value)
    }


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _assigned(scope: ast.AST) -> dict[str, tuple[ast.expr, ...]]:
    """By local name, everything that it is set to with a plain `=`."""
    found: dict[str, tuple[ast.expr, ...]] = {}
    for node in _own_nodes(scope):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            found[name] = (*found.get(name, ()), node.value)
    return found


def _scopes(tree: ast.Module) -> Iterator[ast.AST]:
    yield tree
    yield from (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without those of functions inside it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
            yield from _own_nodes(child)
