"""The import rules of the house, read from the sources and tried in a fresh interpreter.

A plan can be made, checked and drawn without torch; private torch modules are named in `_compat.py` files only.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "remat"
PURE_FOLDERS = ("core", "solvers", "layout", "report")
FRAMEWORKS = {"torch", "jax", "jaxlib"}
COMPATIBILITY_FILES = {PACKAGE / folder / "_compat.py" for folder in ("pytorch", "inductor")}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that the file imports anywhere, `from a import b` as `a.b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_private_torch(module: str) -> bool:
    head, *rest = module.split(".")
    return head == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest)


def read_attributes(path: Path) -> Iterator[str]:
    """Attributes of plain names: `torch._C.x` reaches a private module without importing it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(PACKAGE)) for path in paths]


@pytest.mark.parametrize("folder", PURE_FOLDERS)
def test_pure_folder_never_imports_a_framework(folder: str) -> None:
    offenders = {
        str(path.relative_to(PACKAGE)): module
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for module in imported_modules(path)
        if module.split(".")[0] in FRAMEWORKS or module.startswith("remat.pytorch")
    }
    assert offenders == {}


def test_private_torch_modules_are_imported_in_the_compatibility_files_only() -> None:
    offenders = {
        str(path.relative_to(PACKAGE)): module
        for path in SOURCES
        if path not in COMPATIBILITY_FILES
        for module in (*imported_modules(path), *read_attributes(path))
        if is_private_torch(module)
    }
    assert offenders == {}


def test_no_file_is_called_utils() -> None:
    assert names([path for path in SOURCES if path.stem in ("utils", "util", "helpers", "misc")]) == []


def test_every_source_file_opens_with_a_docstring() -> None:
    assert names([path for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))]) == []


@pytest.mark.parametrize("modules", ["remat", "remat.core, remat.solvers", "remat.report", "remat.cli", "remat.zoo"])
def test_import_leaves_frameworks_and_solver_libraries_alone(modules: str) -> None:
    heavy = ["torch", "jax", "matplotlib", "plotly", "jinja2", "ortools", "highspy", "pyscipopt", "gurobipy", "cplex"]
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
