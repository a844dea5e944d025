"""The notebooks run from top to bottom on a CPU, quickly, and are kept without outputs."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import pytest
from tests.docs.pages import DOCS, ROOT, name_of

pytest.importorskip("torch")
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient to run notebooks")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
MOST_SECONDS = 120
"""They take 10 to 20 on two cores; as much as this only where others use them too."""


def test_notebooks_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["jax", "quickstart", "where-does-my-memory-go"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.stem == "jax":
        pytest.importorskip("jax")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(path, as_version=4)
    begun = time.monotonic()
    with warnings.catch_warnings():
        # The kernel's own libraries: what the notebook does runs in another process.
        warnings.simplefilter("ignore")
        client = nbclient.NotebookClient(
            notebook, timeout=MOST_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
        )
        client.execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert any(cell.outputs for cell in code)
    assert time.monotonic() - begun < MOST_SECONDS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_notebook_is_valid_and_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert [
        cell for cell in notebook.cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)
    ] == []
