"""What a user waits for at first: CPU time until a small model of six layers is planned, beyond what capture takes.

    python -m benchmarks.bench_first_steps [--models encoder,gpt2,cnn,outside] [--budget 0.6x]

Each model in a process of its own, with an empty cost cache and one thread. "capture" is `torch.compile` with backend
"aot_eager", forward and backward; "ours" three steps under the budget, in which it is captured, measured, watched where
its loss is outside, and planned. Both come after a first use on other tiny models, which loads what they import.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.runs import save_results

WIDTH, LAYERS = 64, 6
MODELS = ("encoder", "gpt2", "cnn", "outside")


def encoder(layers: int) -> tuple[Any, Callable[[Any], Any]]:
    import torch
    from torch import nn

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 256, batch_first=True), layers)
            self.head = nn.Linear(WIDTH, 10)

        def forward(self, x: Any, y: Any) -> Any:
            return nn.functional.cross_entropy(self.head(self.layers(x).mean(1)), y)

    x, y = torch.randn(16, 32, WIDTH), torch.randint(10, (16,))
    return Encoder(), lambda model: model(x, y)


def gpt2(layers: int) -> tuple[Any, Callable[[Any], Any]]:
    import torch
    import transformers

    config = transformers.GPT2Config(n_layer=layers, n_embd=WIDTH, n_head=4, vocab_size=256, n_positions=64)
    tokens = torch.randint(256, (4, 64))
    return transformers.GPT2LMHeadModel(config), lambda model: model(input_ids=tokens, labels=tokens).loss


def cnn(layers: int) -> tuple[Any, Callable[[Any], Any]]:
    import torch
    from torch import nn

    channels = [3, *(16 for _ in range(layers))]
    convolutions = [
        layer
        for before, after in zip(channels, channels[1:], strict=False)
        for layer in (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
    ]

    class Classifier(nn.Sequential):
        def forward(self, x: Any, y: Any) -> Any:  # type: ignore[override]
            return nn.functional.cross_entropy(super().forward(x).mean((2, 3)), y)

    x, y = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    return Classifier(*convolutions), lambda model: model(x, y)


def outside(layers: int) -> tuple[Any, Callable[[Any], Any]]:
    """The encoder's layers, whose loss is computed by the loop."""
    import torch
    from torch import nn

    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 256, batch_first=True), layers)
    x = torch.randn(16, 32, WIDTH)
    return model, lambda called: nn.functional.mse_loss(called(x), x)


def cpu_seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def measure_once(name: str, budget: str) -> dict[str, Any]:
    import torch

    import remat

    torch.set_num_threads(1)
    build = {"encoder": encoder, "gpt2": gpt2, "cnn": cnn, "outside": outside}[name]

    def captured(layers: int) -> None:
        model, loss = build(layers)
        loss(torch.compile(model, backend="aot_eager")).backward()

    def planned(layers: int, share: str) -> Any:
        model, loss = build(layers)
        step = remat.optimize(model, share, progress=False)
        for _ in range(3):
            loss(step).backward()
            model.zero_grad()
        return remat.plan_of(step)

    for warm in (lambda: captured(1), lambda: planned(1, "1x")):
        warm()
        torch.compiler.reset()
    capture_s = cpu_seconds(lambda: captured(LAYERS))
    torch.compiler.reset()
    plans: list[Any] = []
    ours_s = cpu_seconds(lambda: plans.append(planned(LAYERS, budget)))
    ops, peak = len(plans[0].problem.graph.ops), plans[0].predicted_peak / plans[0].plain_peak_bytes
    return {"model": name, "ops": ops, "capture_s": capture_s, "ours_s": ours_s, "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--budget", default="0.6x")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once is not None:
        print(json.dumps(measure_once(options.once, options.budget)))
        return
    rows = []
    print(f"{'model':10} {'ops':>5} {'capture':>9} {'ours':>9} {'beyond':>9} {'peak':>7}")
    for name in options.models.split(","):
        command = [sys.executable, "-m", "benchmarks.bench_first_steps", "--once", name, "--budget", options.budget]
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "REMAT_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
        beyond = row["ours_s"] - row["capture_s"]
        times = f"{row['capture_s']:7.2f} s {row['ours_s']:7.2f} s {beyond:7.2f} s"
        print(f"{name:10} {row['ops']:5} {times} {row['peak']:6.3f}x", flush=True)
    save_results(options.output / "first_steps.json", rows)


if __name__ == "__main__":
    main()
