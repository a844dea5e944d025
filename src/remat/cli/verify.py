"""`remat verify`: does a step give the same under a budget as plainly? Exit code 4 where it does not."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from remat.cli.options import (
    BudgetOption,
    DeviceOption,
    JsonOption,
    ScaleOption,
    SeedOption,
    SolverOption,
    TargetArgument,
)
from remat.cli.request import check_request
from remat.cli.subjects import open_subject
from remat.cli.target import runs_target
from remat.cli.terminal.console import log, show, show_json
from remat.errors import VerificationError

StepsOption = Annotated[int, typer.Option("--steps", min=1, help="Compare this many AdamW steps.")]


def verify(
    target: TargetArgument,
    budget: BudgetOption,
    steps: StepsOption = 1,
    solver: SolverOption = "auto",
    scale: ScaleOption = "tiny",
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare outputs, gradients and state with the plain model, bit for bit; a JAX loss up to rounding."""
    check_request(budget, solver)
    subject = open_subject(target, scale=scale, device=device, seed=seed)
    with runs_target(target):
        differences = subject.differences(budget, solver, steps, seed)
    if as_json:
        show_json({"ok": not differences, "target": target, "steps": steps, "differences": list(differences)})
    elif not differences:
        show(Text(f"{target}: {subject.sameness} over {steps} step{'s' if steps > 1 else ''} under {budget}."))
    if differences:
        for difference in differences:
            log(f"  {difference}")
        raise VerificationError(f"{target} differs from its plain step under {budget} in {len(differences)} places.")
