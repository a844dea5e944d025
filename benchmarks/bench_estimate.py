"""Estimated against measured peak of whole training steps (forward, backward, AdamW), fp32 and bf16 autocast.

    python -m benchmarks.bench_estimate [--device cuda] [--models gpt,resnet50] [--scales tiny,demo] [--llama-70b]

"here" is the estimate for the device in use, on which the ops that could set the peak are tried; "by rule" is the one
made without it, from fake CPU tensors that are treated as a GPU's. `--llama-70b` estimates a model of 70 billion
parameters and tells the time and memory that takes.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from benchmarks.runs import save_results

import remat
from remat import zoo
from remat.core.budget import format_bytes
from remat.pytorch.estimate.building_fakes import builds_fakes
from remat.pytorch.measure.training_step import TrainingStep, make_optimizer, precision_of
from remat.zoo import Example

CUDA_MODELS = ("gpt2-medium", "resnet50-large")
RULES_FOR = "H100-80GB"
"""Stands for a large card that is not here: the peak by rule depends on its generation, not on its memory."""


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    scale: str
    amp: str
    how: str
    estimated_bytes: int
    measured_bytes: int
    estimated_ms: float
    measured_ms: float
    estimate_seconds: float

    @property
    def error(self) -> float:
        return self.estimated_bytes / self.measured_bytes - 1


def build(name: str, scale: str, device: str) -> Example:
    if name == "gpt2-medium":
        import transformers

        config = transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16)
        tokens = torch.randint(50257, (16, 1024), device=device)
        model = transformers.GPT2LMHeadModel(config).to(device).train()
        return Example(model, (), {"input_ids": tokens, "labels": tokens})
    if name == "resnet50-large":
        return zoo.build("resnet50", scale="demo", device=device, batch=128, side=112, width=64, shrink=1)
    return zoo.build(name, scale=scale, device=device)


def timed_estimate(example: Example, amp: str, gpu: str | None) -> tuple[remat.Estimate, float]:
    start = time.perf_counter()
    found = remat.estimate(example.model, *example.args, optimizer="adamw", amp=amp, gpu=gpu, **example.kwargs)
    return found, time.perf_counter() - start


def measured(name: str, scale: str, amp: str, device: str) -> remat.Measurement:
    """A step once the optimizer has its state."""
    example = build(name, scale, device)
    optimizer = make_optimizer("adamw", example.model)
    step = TrainingStep(example.model, example.args, example.kwargs, optimizer, precision_of(amp))
    step()
    return remat.measure(step)


def run(name: str, scale: str, amp: str, device: str) -> list[Row]:
    found = {}
    if device == "cuda":
        with builds_fakes():
            fake = build(name, scale, "cpu")
        found["by rule"] = timed_estimate(fake, amp, RULES_FOR)
    found["here"] = timed_estimate(build(name, scale, device), amp, None)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    real = measured(name, scale, amp, device)
    gc.collect()
    return [
        Row(name, scale, amp, how, item.peak_bytes, real.peak_bytes, item.seconds * 1e3, real.seconds * 1e3, seconds)
        for how, (item, seconds) in found.items()
    ]


def show(row: Row) -> None:
    print(
        f"{row.model:15} {row.scale:5} {row.amp:5} {row.how:8} {format_bytes(row.estimated_bytes):>11} "
        f"{format_bytes(row.measured_bytes):>11} {row.error:+8.2%} {row.estimated_ms:10.1f} {row.measured_ms:10.1f} "
        f"{row.estimate_seconds:8.1f}",
        flush=True,
    )


def estimate_llama_70b() -> None:
    start = time.perf_counter()
    with builds_fakes():
        example = zoo.build("llama-70b")
    found, _ = timed_estimate(example, "bf16", "B200")
    seconds = time.perf_counter() - start
    parameters = sum(parameter.numel() for parameter in example.model.parameters())
    # Linux counts in KiB.
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"llama-70b: {parameters / 1e9:.1f} billion parameters, {len(found.profile.ops)} ops, peak "
        f"{format_bytes(found.peak_bytes)}, step {found.seconds:.2f} s on {found.device.name}; estimated in "
        f"{seconds:.1f} s with {format_bytes(peak_rss)} resident"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", default="")
    parser.add_argument("--scales", default="")
    parser.add_argument("--llama-70b", action="store_true")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.llama_70b:
        estimate_llama_70b()
        return
    is_cuda = options.device == "cuda"
    names = options.models.split(",") if options.models else (CUDA_MODELS if is_cuda else tuple(zoo.REGISTRY))
    scales = options.scales.split(",") if options.scales else (("demo",) if is_cuda else zoo.SCALES)
    amps = ("bf16",) if is_cuda else ("none", "bf16")
    print(f"{options.device}, torch {torch.__version__}")
    print(
        f"{'model':15} {'scale':5} {'amp':5} {'how':8} {'estimated':>11} {'measured':>11} {'error':>8} {'est. ms':>10} "
        f"{'real ms':>10} {'took s':>8}"
    )
    rows: list[Row] = []
    for scale in scales:
        for name in names:
            for amp in amps:
                rows.extend(run(name, scale, amp, options.device))
                for row in rows[-2 if is_cuda else -1 :]:
                    show(row)
    worst = max(rows, key=lambda row: abs(row.error))
    print(f"largest error {worst.error:+.2%} ({worst.model}, {worst.scale}, {worst.amp}, {worst.how})")
    path = options.output / f"estimate_{options.device}.json"
    save_results(path, [{**asdict(row), "error": row.error} for row in rows])


if __name__ == "__main__":
    main()
