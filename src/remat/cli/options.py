"""The options that several commands share, written once so that they mean the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="`package.module:factory`, which returns a model and its batch, or a JAX loss, its parameters and its "
        "batch; or the name of a zoo model such as gpt.",
        show_default=False,
    ),
]
BudgetOption = Annotated[
    str,
    typer.Option(
        "--budget",
        "-b",
        help='Bytes, "8GiB", "500MB", "80%" of the device, or "0.5x" of the plain step\'s peak.',
        show_default=False,
    ),
]
SolverOption = Annotated[str, typer.Option("--solver", help="Which solver makes the schedule.")]
TimeLimitOption = Annotated[float, typer.Option("--time-limit", min=0.0, help="Seconds the solver may take.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of everything random.")]
ScaleOption = Annotated[str, typer.Option("--scale", help="Size of a zoo model: tiny or demo.")]
DeviceOption = Annotated[
    str, typer.Option("--device", help="cpu, cuda, cuda:1, …; auto is CUDA where there is one, for zoo models.")
]
OffloadOption = Annotated[
    str | None,
    typer.Option(
        "--offload",
        metavar="WHERE",
        help='Where values may spend a while: "cpu", "cpu:64GiB" or "disk:/a/folder"; nowhere if left out.',
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
OptimizerOption = Annotated[
    str, typer.Option("--optimizer", help="Takes the step of a model: adamw, adam, sgd, momentum, …, or none.")
]
AmpOption = Annotated[str, typer.Option("--amp", help="Autocast of a model's forward: bf16, fp16 or none.")]
