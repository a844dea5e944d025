"""The import rules of the house, read from the sources and tried in a fresh interpreter.

A plan can be made, checked and drawn without torch; private torch modules are named in `_compat.py` files only.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "remat"
PURE_FOLDERS = ("core", "solvers", "layout", "report")
FRAMEWORKS = {"torch", "jax", "jaxlib", "keras", "tensorflow"}
SOURCES = sorted(PACKAGE.rglob("*.py"))
MOST_MODULES, MOST_LINES, USUAL_FUNCTION_LINES = 22, 450, 20

ROOMS = (
    *("errors", "core", "core.search", "core.results", "core.files"),
    *("solvers.base", "solvers.schedule", "solvers.strategies", "solvers.backends", "solvers.search", "solvers.exact"),
    *("solvers", "layout.problem", "layout.bounds", "layout.base", "layout.packing", "layout"),
    *("report.tables", "report.contents", "report.pictures", "report", "zoo"),
    *("integrations.loss_only", "integrations.masks"),
    *("pytorch.ops", "pytorch._compat", "pytorch", "pytorch.graph", "pytorch.costs", "pytorch.host"),
    *("within", "pipeline", "solve_apart"),
    *("pytorch.resident", "distributed.agreement", "pytorch.run", "pytorch.measure", "pytorch.estimate"),
    *("pytorch.explore", "pytorch.guard", "pytorch.online", "pytorch.batches"),
    *("distributed.links", "distributed.pipelines", "distributed"),
    *("fit.levers", "fit.export", "fit"),
    *("inductor._compat", "inductor.loss", "inductor.model", "inductor.dry_run", "inductor"),
    *("jax._compat", "jax.graph", "jax.costs", "jax.run", "jax.scans", "jax"),
    *("keras._compat", "keras.layers", "keras"),
    *("integrations", "bench", "remat", "cli"),
)
"""Folders, and files that come before the rest of theirs, in the order in which they may import each other."""

RUN_BACK = {
    ("remat.__main__", "cli"): "`python -m remat` is the command line",
    ("remat.core", "core.files"): "the front of `core` offers what is in its rooms",
    ("remat.core", "core.results"): "the front of `core` offers what is in its rooms",
    ("remat.core.files.plan_file", "layout"): "an arena read from a file is checked like any other",
    ("remat.core.results.explain", "solvers"): "`plan.compare` solves, when it is called",
    ("remat.core.results.pareto", "core.files"): "a curve saves itself",
    ("remat.core.results.plan", "core.files"): "a plan saves itself",
    ("remat.core.results.profile", "core.files"): "a profile saves itself",
    ("remat.core.results.pareto", "report"): "a curve draws itself",
    ("remat.core.results.plan", "report"): "a plan draws itself",
    ("remat.core.results.profile", "report"): "a profile draws itself",
    ("remat.errors", "core.results"): "the type of what an error carries",
    ("remat.pipeline", "pytorch.run"): "it knows the order of the arrows, lowering the last of them",
    ("remat.pytorch.run.backend", "inductor"): "loaded only where a step is to be compiled",
    ("remat.pytorch.run.uncaptured", "pytorch.online"): "loaded only where nothing of a step can be captured",
    ("remat.report.html", "remat"): "the version, in a page's footer",
}
"""Imports against that order, each made inside a function or for a type, and why."""


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that the file imports anywhere, `from a import b` as `a.b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = {
    ".".join(("remat", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in SOURCES
}


def own_imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, at its top or inside a function."""
    found = {name if name in MODULES else name.rpartition(".")[0] for name in imported_modules(path)}
    return found & MODULES.keys()


def room_of(module: str) -> str:
    name = module.removeprefix("remat.")
    rooms = [room for room in ROOMS if name == room or name.startswith(f"{room}.")]
    return max(rooms, key=len, default="remat")


def is_compatibility(path: Path) -> bool:
    return "_compat" in (path.stem, path.parent.name)


def is_private_torch(module: str) -> bool:
    head, *rest = module.split(".")
    return head == "torch" and any(map(is_private, rest))


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
        if not is_compatibility(path)
        for module in (*imported_modules(path), *read_attributes(path))
        if is_private_torch(module)
    }
    assert offenders == {}


def test_private_attributes_of_torch_are_read_in_the_compatibility_files_only() -> None:
    """Of torch's objects as of its modules; names of ops, which are declared for all, may begin with an underscore."""
    torch = pytest.importorskip("torch")
    nodes = [(path, node) for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    own = {node.name for _, node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.attr for _, node in nodes if isinstance(node, ast.Attribute) and is_set_on_self(node)}
    own |= {
        node.target.id for _, node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    read = {
        (str(path.relative_to(PACKAGE)), node.attr)
        for path, node in nodes
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_compatibility(path)
    }
    offenders = {(path, name) for path, name in read if name not in own and not hasattr(torch.ops.aten, name)}
    # `sys._getframe`, and what a subclass of torch.fx's code generator inherits.
    assert offenders == {("inductor/dry_run/run.py", "_getframe"), ("pytorch/run/lower.py", "_func_name")}


def is_set_on_self(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_arrows_between_rooms_run_one_way(capsys: pytest.CaptureFixture[str]) -> None:
    back = {
        (module, room_of(other))
        for module, path in MODULES.items()
        for other in own_imports(path)
        if ROOMS.index(room_of(other)) > ROOMS.index(room_of(module))
    }
    with capsys.disabled():
        print(f"\n{' < '.join(ROOMS)}")
    assert back - RUN_BACK.keys() == set(), "imports that run back"
    assert RUN_BACK.keys() - back == set(), "exceptions that nobody needs"


def test_every_room_is_there() -> None:
    assert [room for room in ROOMS if room != "remat" and f"remat.{room}" not in MODULES] == []


def test_rooms_are_small() -> None:
    modules = Counter(path.parent for path in SOURCES)
    assert {str(folder.relative_to(PACKAGE)): count for folder, count in modules.items() if count > MOST_MODULES} == {}
    lines = {path: len(path.read_text().splitlines()) for path in SOURCES}
    assert {str(path.relative_to(PACKAGE)): count for path, count in lines.items() if count > MOST_LINES} == {}


def test_nineteen_functions_of_twenty_are_short() -> None:
    nodes = (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())))
    lengths = sorted((node.end_lineno or 0) - node.lineno + 1 for node in nodes if isinstance(node, ast.FunctionDef))
    assert lengths[int(0.95 * len(lengths))] <= USUAL_FUNCTION_LINES


def private_reads(path: Path) -> Iterator[str]:
    """Private attributes that the file reads of others, by name or by string; ops may be called as they like."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner, name = ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            owner, name = ast.unparse(node.args[0]), ast.unparse(node.args[1]).strip("'\"")
        else:
            continue
        is_private = name.startswith("_") and not name.endswith("__")
        if is_private and owner not in ("self", "cls", "sys") and not owner.startswith("torch.ops."):
            yield f"{owner}.{name}"


def test_compiled_steps_read_private_attributes_in_their_compatibility_files_only() -> None:
    folder = PACKAGE / "inductor"
    offenders = {
        str(path.relative_to(PACKAGE)): found
        for path in sorted(folder.rglob("*.py"))
        if not is_compatibility(path) and (found := list(private_reads(path)))
    }
    assert offenders == {}
    assert list(private_reads(folder / "_compat" / "compiling.py")), "the rule sees what it is about"


def test_no_file_is_called_utils() -> None:
    assert names([path for path in SOURCES if path.stem in ("utils", "util", "helpers", "misc")]) == []


def test_every_source_file_opens_with_a_docstring() -> None:
    assert names([path for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))]) == []


def test_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_other_libraries_are_imported_in_the_file_that_bears_their_name_only() -> None:
    libraries = {"transformers", "lightning", "accelerate", "trl", "peft", "diffusers"}
    offenders = {
        str(path.relative_to(PACKAGE)): module
        for path in SOURCES
        for module in imported_modules(path)
        if (library := module.split(".")[0]) in libraries and path != PACKAGE / "integrations" / f"{library}.py"
    }
    assert offenders == {}


@pytest.mark.parametrize("modules", ["remat", "remat.core, remat.solvers", "remat.report", "remat.cli", "remat.zoo"])
def test_import_leaves_frameworks_and_solver_libraries_alone(modules: str) -> None:
    heavy = ["torch", "jax", "tensorflow", "matplotlib", "plotly", "jinja2", "ortools", "highspy", "scipy", "pyscipopt"]
    heavy += ["gurobipy", "cplex"]
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
