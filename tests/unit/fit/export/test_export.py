"""Exported files against the libraries that read them, and what is refused."""

from __future__ import annotations

import ast
import builtins
import itertools
import json
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from remat.errors import FileFormatError, RematError, UnknownName
from remat.fit.export import KINDS, Exported, ScriptTarget, export, render
from remat.fit.levers import Levers, OptimizerKind, Precision, Recomputation, Zero

TARGET = ScriptTarget("my_package.train:make", {"layers": 24})


def runnable() -> list[Levers]:
    """Every combination that can be set up, on one rank and on four."""
    choices = itertools.product(Precision, OptimizerKind, Zero, Recomputation, (False, True), (1, 2), (1, 4))
    found = [
        Levers(
            precision,
            optimizer,
            zero,
            recomputation,
            budget_bytes=2**30 if recomputation is Recomputation.PLANNED else None,
            offloads_optimizer=offloads,
            accumulation=accumulation,
            micro_batch=3,
            world=world,
        )
        for precision, optimizer, zero, recomputation, offloads, accumulation, world in choices
        if world > 1 or not zero
    ]
    return [levers for levers in found if levers.is_runnable]


def texts(kind: str) -> list[tuple[Levers, Exported]]:
    """What can be exported as `kind`; DeepSpeed refuses some."""
    found = []
    for levers in runnable():
        try:
            found.append((levers, render(levers, kind, TARGET)))
        except RematError as refused:
            assert kind == "deepspeed" and str(refused).startswith("DeepSpeed")
    assert len(found) > 100
    return found


def names_of(tree: ast.Module) -> tuple[set[str], set[str], set[str]]:
    """What a module imports and defines at its top, what else it gives names to, and what it reads."""
    top, given, read = set(), set(dir(builtins)) | {"__name__", "__doc__"}, set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            top |= {(item.asname or item.name).split(".")[0] for item in node.names}
        elif isinstance(node, ast.FunctionDef):
            top |= {node.name}
        elif isinstance(node, ast.arg):
            given.add(node.arg)
        elif isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else given).add(node.id)
    return top, given, read


def test_every_script_uses_what_it_imports_and_imports_what_it_uses() -> None:
    for levers, exported in random.Random(0).sample(texts("script"), 100):
        top, given, read = names_of(ast.parse(exported.text))
        assert top <= read <= top | given, levers
        assert max(map(len, exported.text.splitlines())) <= 120, levers


def test_script_names_a_launcher_for_its_ranks() -> None:
    assert "    python train.py" in render(Levers(), "script", TARGET).text
    assert "torchrun --nproc-per-node 4 " in render(Levers(world=4), "script", TARGET).text
    assert "torchrun --nnodes 8 --nproc-per-node 8 " in render(Levers(world=64), "script", TARGET).text


def test_script_without_a_target_asks_for_one_and_one_of_the_zoo_builds_it() -> None:
    assert 'parser.add_argument("target", help' in render(Levers(), "script", ScriptTarget()).text
    assert "zoo.build(TARGET, **SIZES)" in render(Levers(), "script", ScriptTarget("gpt", {"scale": "tiny"})).text


def test_script_needs_remat_only_where_remat_does_something() -> None:
    for levers, exported in texts("script"):
        offloads = levers.offloads_optimizer and not levers.zero.is_sharded
        does = levers.budget_bytes is not None or offloads
        assert ("import remat" in exported.text) == does, levers


def test_accelerate_reads_its_file_and_launches_so_many_processes(tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    seen = set()
    for levers, exported in texts("accelerate"):
        if exported.text in seen:
            continue
        seen.add(exported.text)
        (tmp_path / "config.yaml").write_text(exported.text)
        found = config_args.load_config_from_file(str(tmp_path / "config.yaml"))
        assert found.num_processes == levers.world and not found.use_cpu
        assert found.mixed_precision in ("no", "fp16", "bf16")
        kind = "FSDP" if levers.zero.is_sharded else "MULTI_GPU" if levers.world > 1 else "NO"
        assert str(found.distributed_type).endswith(kind)
        if levers.zero.is_sharded:
            assert found.fsdp_config["fsdp_reshard_after_forward"] == (levers.zero is Zero.WEIGHTS)
            assert found.fsdp_config["fsdp_offload_params"] == levers.offloads_optimizer


def test_names_that_accelerate_is_given_are_options_of_its_launcher() -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    known = {action.dest for action in launch.launch_command_parser()._actions}
    exported = render(Levers(zero=Zero.WEIGHTS, world=4), "accelerate", TARGET)
    names = [line.strip().split(":")[0] for line in exported.text.splitlines() if line.startswith("  ")]
    assert names and set(names) <= known


def test_training_arguments_are_read_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    # It refuses bf16 where there is no GPU that has it.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    parser: Any = transformers.HfArgumentParser(transformers.TrainingArguments)
    seen = set()
    for levers, exported in texts("trainer"):
        if exported.text in seen:
            continue
        seen.add(exported.text)
        (tmp_path / "arguments.json").write_text(exported.text)
        (found,) = parser.parse_json_file(str(tmp_path / "arguments.json"))
        assert found.per_device_train_batch_size == 3 and found.gradient_accumulation_steps == levers.accumulation
        assert found.fp16 == levers.has_scaler
        assert bool(found.fsdp) == levers.zero.is_sharded
        if levers.zero.is_sharded:
            plugin = found.fsdp_plugin_args
            assert plugin["fsdp_version"] == 2
            assert plugin["reshard_after_forward"] == (levers.zero is Zero.WEIGHTS)
            assert plugin.get("cpu_offload", False) == levers.offloads_optimizer


def test_deepspeed_reads_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `DeepSpeedConfig` checks sizes against the ranks, stages against precisions, and every name."""
    deepspeed = pytest.importorskip("deepspeed", reason="install deepspeed to read what is exported for it")
    seen = set()
    for levers, exported in texts("deepspeed"):
        if exported.text in seen:
            continue
        seen.add(exported.text)
        ranks = SimpleNamespace(get_rank=lambda: 0, get_world_size=partial(int, levers.world))
        monkeypatch.setattr("deepspeed.runtime.config.dist", ranks)
        found = deepspeed.DeepSpeedConfig(json.loads(exported.text))
        assert found.train_batch_size == levers.batch
        assert found.zero_optimization_stage == levers.zero
        assert found.torch_autocast_enabled == levers.precision.is_autocast
        assert found.bfloat16_config.enabled == (levers.precision is Precision.PURE_BF16)


def test_what_a_file_has_no_place_for_is_told() -> None:
    planned = Levers(recomputation=Recomputation.PLANNED, budget_bytes=2**30, offloads_optimizer=True)
    for kind, word in (
        ("accelerate", "remat.optimize(model, 1073741824)"),
        ("trainer", "RematCallback(budget=1073741824)"),
    ):
        notes = " ".join(render(planned, kind, TARGET).notes)
        assert word in notes and "remat.offload_optimizer(optimizer, in_backward=True)" in notes
    assert render(planned, "script", TARGET).notes == ()


def test_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    exported = export(Levers(), "script", path, target="gpt")
    assert path.read_text() == exported.text and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileFormatError, match="Cannot write"):
        export(Levers(), "script", tmp_path / "none" / "train.py")


def test_what_cannot_be_exported_is_refused_in_one_sentence() -> None:
    with pytest.raises(UnknownName, match="Cannot export as 'toml'; known are script, deepspeed, accelerate, trainer"):
        render(Levers(), "toml", TARGET)
    for kind in KINDS:
        with pytest.raises(RematError, match="The pipeline of 2 stages is predicted only"):
            render(Levers(pipeline_stages=2, world=4), kind, TARGET)
    with pytest.raises(RematError, match="DeepSpeed offloads the optimizer only together with ZeRO"):
        render(Levers(offloads_optimizer=True), "deepspeed", TARGET)


def test_command_refuses_before_it_searches_and_writes_what_it_found(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from remat.cli import app

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, ["fit", "mlp", "--gpu", "H100-80GB", *map(str, arguments)])

    path = tmp_path / "arguments.json"
    assert run("--export", "toml", path).exit_code == 2
    assert "create it first" in run("--export", "trainer", tmp_path / "none" / "x.json").stderr
    assert "no combination to export" in run("--grow", "batch", "--export", "trainer", path).stderr
    done = run("--allow", "bf16", "--batch", "4", "--export", "trainer", path)
    assert done.exit_code == 0, done.stderr
    assert f"Wrote {path}" in done.stderr.replace("\n", "")
    assert json.loads(path.read_text())["per_device_train_batch_size"] >= 1
