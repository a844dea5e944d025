"""A finished run of the experiments, made by hand: one ResNet at two batches."""

from __future__ import annotations

from remat.core.results.bench import Bench, BenchTrial, Breakdown, Case, Experiment, Figures, Way
from remat.core.results.pareto import Pareto, ParetoPoint

MIB = 1 << 20


def trial(way: Way, peak_mib: int, overhead: float, limit: float | None = None, noise: float = 0.01) -> BenchTrial:
    predicted, measured = Figures(peak_mib * MIB, overhead), Figures(peak_mib * MIB, overhead - noise)
    return BenchTrial(way, limit, peak_mib * MIB if limit else None, predicted, measured, 0.1 * (1 + overhead), None)


SMALL = Case(
    batch=4,
    resident_bytes=10 * MIB,
    plain_seconds=0.1,
    trials=(
        trial(Way.PLAIN, 60, 0.0),
        trial(Way.PER_BLOCK, 35, 0.33),
        trial(Way.SQRT_N, 40, 0.4),
        trial(Way.MU_TWO, 40, 0.19, 0.20),
        trial(Way.OPTIMAL, 25, 0.2, 0.20),
    ),
)
LARGE = Case(
    batch=8,
    resident_bytes=10 * MIB,
    plain_seconds=0.09,
    trials=(
        trial(Way.PLAIN, 110, 0.0),
        trial(Way.PER_BLOCK, 60, 0.33),
        trial(Way.SQRT_N, 70, 0.4),
        trial(Way.MU_TWO, 60, 0.19, 0.20),
        trial(Way.MU_TWO, 55, 0.24, 0.25),
        trial(Way.MU_TWO, 50, 0.29, 0.30),
        trial(Way.OPTIMAL, 44, 0.2, 0.20),
        trial(Way.OPTIMAL, 38, 0.25, 0.25),
        trial(Way.OPTIMAL, 33, 0.3, 0.30),
    ),
)
CURVE = Pareto(
    name="resnet50, batch 8",
    device="cpu",
    plain_peak_bytes=110 * MIB,
    base_time_ns=2e8,
    floor_bytes=20 * MIB,
    points=(
        ParetoPoint("auto", 110 * MIB, 110 * MIB, 2e8, 2e8),
        ParetoPoint("auto", 44 * MIB, 44 * MIB, 2.4e8, 2.3e8),
        ParetoPoint("auto", 33 * MIB, 33 * MIB, 2.6e8, 2.5e8),
    ),
)
EXPERIMENT = Experiment(
    model="resnet50",
    sizes={"side": 32},
    precision="fp32",
    cases=(SMALL, LARGE),
    curve=CURVE,
    breakdowns=(
        Breakdown(Way.PLAIN, None, {"activations": 90 * MIB, "parameters": 10 * MIB, "gradients": 10 * MIB}),
        Breakdown(Way.OPTIMAL, 0.20, {"activations": 24 * MIB, "parameters": 10 * MIB, "workspace": 10 * MIB}),
    ),
)
BENCH = Bench("cpu", "2.13.0", 0, (EXPERIMENT,), ("gpt at batch 4096 was left out.",))
