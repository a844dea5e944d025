"""`remat bench` refuses what it cannot do before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from remat.cli import app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--models", "alexnet"), "No model is called 'alexnet'; the zoo has"),
        (("--models", ","), "No model is called ''"),
        (("--batches", "4,x"), "Cannot read the batches '4,x'; write whole numbers above 0"),
        (("--batches", "0"), "Cannot read the batches '0'"),
        (("--device", "abacus"), "Cannot use the device 'abacus'"),
    ],
)
def test_bad_request_is_one_sentence(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "-o", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
