"""`remat fit` and `remat ladder`: what they print, what they write, and what they refuse before anything is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

from remat.cli import app


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stdout, result.stderr


def test_fit_prints_one_object_and_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "fit.html"
    code, out, _ = run("fit", "mlp", "--gpu", "T4", "--gpus", "2", "--batch", "8", "--json", "--report", str(page))
    found = json.loads(out)
    assert code == 0
    assert found["rows"][0]["fits"] and found["levers"]["world"] == 2
    assert "<svg" in page.read_text()


def test_ladder_has_a_rung_for_every_lever() -> None:
    code, out, _ = run("ladder", "mlp", "--gpu", "A100-40GB", "--batch", "8", "--json")
    rows = json.loads(out)["rows"]
    assert code == 0
    assert [row["label"].split(",")[0] for row in rows[:3]] == [
        "plain",
        "+ checkpointing per block",
        "+ mixed precision",
    ]
    assert len(rows) == 7 and rows[-1]["peak_bytes"] < rows[0]["peak_bytes"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "X1"), "No device is called 'X1'"),
        (("--gpu", "T4", "--link", "wire"), "No link is called 'wire'"),
        (("--gpu", "T4", "--between", "pigeon"), "No link is called 'pigeon'"),
        (("--gpu", "T4", "--allow", "magic"), "No lever is called 'magic'"),
        (("--gpu", "T4", "--gpus", "3", "--batch", "8"), "cannot be divided among 3 ranks"),
        (("--gpu", "T4", "--memory", "50%"), "is in bytes"),
        (("--gpu", "T4", "--report", "fit.txt"), "let it end in .html"),
        (("--gpu", "T4", "--grow", "heads"), "Nothing called 'heads' can grow"),
    ],
)
def test_refuses_in_one_sentence(words: tuple[str, ...], said: str) -> None:
    code, _, err = run("fit", "mlp", *words)
    assert code != 0
    assert said in " ".join(err.split())


def test_what_fits_nowhere_says_what_is_needed() -> None:
    code, _, err = run("fit", "mlp", "--gpu", "T4", "--memory", "1MiB", "--batch", "4")
    assert code == 3
    assert "Nothing fits 1 x T4" in " ".join(err.split())
