"""Exported scripts, really run: two processes over gloo, against plain PyTorch in this one."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from remat import zoo
from remat.fit.export import ScriptTarget, export, render
from remat.fit.levers import Levers, OptimizerKind, Precision, Recomputation, Zero
from remat.pytorch.explore.module_blocks import repeated_blocks

STEPS, RATE = 3, 0.1
TARGET = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(16, 1)

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return (self.head(x) - y).square().mean()


def make():
    batch = torch.Generator().manual_seed(7)
    return Net(), (torch.randn(16, 16, generator=batch), torch.randn(16, 1, generator=batch))
"""
PAIR = {"micro_batch": 2, "world": 2}
SHARING = {
    "ddp": Levers(accumulation=2, recomputation=Recomputation.PER_BLOCK, optimizer=OptimizerKind.SGD, **PAIR),
    "zero1": Levers(zero=Zero.OPTIMIZER, optimizer=OptimizerKind.MOMENTUM, **PAIR),
    "zero2": Levers(zero=Zero.GRADIENTS, optimizer=OptimizerKind.MOMENTUM, accumulation=2, **PAIR),
    "zero3": Levers(zero=Zero.WEIGHTS, optimizer=OptimizerKind.SGD, recomputation=Recomputation.PER_BLOCK, **PAIR),
    "zero3 on host": Levers(zero=Zero.WEIGHTS, optimizer=OptimizerKind.MOMENTUM, offloads_optimizer=True, **PAIR),
}
"""In fp32, where two ranks train as one does up to rounding."""
BUDGET = {"recomputation": Recomputation.PLANNED, "budget_bytes": 10 * 2**20}
OTHERS = {
    "fp16": Levers(Precision.FP16, zero=Zero.WEIGHTS, accumulation=2, **PAIR),
    "bf16 zero1": Levers(Precision.BF16, zero=Zero.OPTIMIZER, **PAIR),
    "masters": Levers(Precision.PURE_BF16, zero=Zero.GRADIENTS, accumulation=2, **PAIR),
    "bf16 throughout": Levers(Precision.PURE_BF16, OptimizerKind.ADAMW_WITHOUT_MASTERS, **PAIR),
    "planned ddp": Levers(Precision.BF16, accumulation=2, **BUDGET, **PAIR),
    "planned fsdp": Levers(Precision.FP16, zero=Zero.WEIGHTS, **BUDGET, **PAIR),
    "planned alone": Levers(
        Precision.FP16, **BUDGET, offloads_optimizer=True, offloads_activations=True, micro_batch=16
    ),
    "host masters alone": Levers(Precision.PURE_BF16, offloads_optimizer=True, accumulation=3, micro_batch=2),
}
RUN_ALL = """
import os, runpy, sys
for port, script in zip(sys.argv[1::2], sys.argv[2::2]):
    os.environ["MASTER_PORT"] = port
    sys.argv = [script, "--steps", "3", "--learning-rate", "0.1", "--save", script + ".pt"]
    runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small_target.py").write_text(TARGET)
    return tmp_path


def written(folder: Path, name: str, levers: Levers) -> Path:
    path = folder / f"{name.replace(' ', '_')}.py"
    export(levers, "script", path, target="small_target:make")
    return path


def environment(folder: Path, **extra: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "REMAT_CACHE_DIR": str(folder / "cache"), **extra}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def trained(folder: Path, levers: Levers) -> dict[str, Any]:
    """The weights of a plain loop over whole batches."""
    spec: Any = importlib.util.spec_from_file_location("small_target", folder / "small_target.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model, args = module.make()
    momentum = 0.9 if levers.optimizer is OptimizerKind.MOMENTUM else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    for step in range(STEPS):
        rows = torch.arange(step * levers.batch, (step + 1) * levers.batch) % 16
        model(*(item[rows] for item in args)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.slow
def test_two_ranks_train_as_plain_pytorch_does(folder: Path) -> None:
    scripts = {name: written(folder, name, levers) for name, levers in SHARING.items()}
    # A port for each: what one script leaves behind would be found by the next.
    runs = [word for script in scripts.values() for word in (free_port(), str(script))]
    where = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RUN_ALL, *runs],
            cwd=folder,
            env=environment(folder, RANK=str(rank), LOCAL_RANK=str(rank), **where),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0], told
    assert len(re.findall(r"step \d: loss \d", told[0][0])) == STEPS * len(SHARING) and told[1][0] == ""
    for name, levers in SHARING.items():
        found = torch.load(f"{scripts[name]}.pt", weights_only=True)
        torch.testing.assert_close(found, trained(folder, levers), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_every_kind_of_script_runs_and_learns(name: str, folder: Path) -> None:
    levers = OTHERS[name]
    launch = [sys.executable]
    if levers.world > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(levers.world)]
    command = [*launch, str(written(folder, name, levers)), "--steps", "20", "--learning-rate", "0.01"]
    command += ["--save", str(folder / "weights.pt")]
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"step \d+: loss (\S+)", done.stdout)]
    assert len(losses) == 20 and sum(losses[-4:]) < sum(losses[:4]) < float("inf")
    model = {**torch.load(folder / "weights.pt", weights_only=True)}
    assert {name.split(".")[0] for name in model} == {"blocks", "head"} and len(model) == 20


@pytest.mark.parametrize("name", sorted(zoo.REGISTRY))
def test_scripts_find_the_blocks_that_are_planned_for(name: str) -> None:
    script: dict[str, Any] = {"__name__": "script"}
    exec(render(Levers(recomputation=Recomputation.PER_BLOCK), "script", ScriptTarget("gpt")).text, script)
    model = zoo.build(name).model
    assert script["blocks"](model) == [model.get_submodule(path) for path in repeated_blocks(model)]


def test_other_numbers_of_ranks_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script: dict[str, Any] = {"__name__": "script"}
    exec(written(folder, "eight", Levers(world=8)).read_text(), script)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["eight.py"])
    try:
        with pytest.raises(SystemExit, match="This script is for 8 ranks, and 1 were started."):
            script["main"]()
    finally:
        torch.distributed.destroy_process_group()
