"""`remat verify`: does a model give the same bits under a budget as plainly? Exit code 4 where it does not."""

from __future__ import annotations

import copy
from dataclasses import replace
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
from remat.cli.target import load_target, runs_target
from remat.cli.terminal.console import log, show, show_json, working
from remat.cli.training import Trainee
from remat.errors import RematError, VerificationError
from remat.zoo import Example

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
    """Compare outputs, gradients, buffers and random state, bit for bit, with the plain model."""
    differences = find_differences(target, budget, steps=steps, solver=solver, scale=scale, device=device, seed=seed)
    if as_json:
        show_json({"ok": not differences, "target": target, "steps": steps, "differences": list(differences)})
    elif not differences:
        show(Text(f"{target}: the same bits over {steps} step{'s' if steps > 1 else ''} under {budget}."))
    if differences:
        for difference in differences:
            log(f"  {difference}")
        raise VerificationError(f"{target} differs from its plain step under {budget} in {len(differences)} places.")


def find_differences(
    target: str,
    budget: str,
    *,
    steps: int = 1,
    solver: str = "auto",
    scale: str = "tiny",
    device: str = "auto",
    seed: int = 0,
) -> tuple[str, ...]:
    """The differences of the first step that has any; both models are trained on between steps."""
    check_request(budget, solver)
    example = load_target(target, scale=scale, device=device, seed=seed)
    if not hasattr(example.model, "parameters"):
        raise RematError(f"remat verify compares modules; {target!r} gives a {type(example.model).__name__}.")
    with runs_target(target):
        return _compare(target, example, budget, solver, steps, seed)


def _compare(target: str, example: Example, budget: str, solver: str, steps: int, seed: int) -> tuple[str, ...]:
    import remat

    plain = Trainee.plain(example)
    planned = Trainee.plain(replace(example, model=copy.deepcopy(example.model))).under(budget, solver)
    for step in range(1, steps + 1):
        with working(f"Comparing {target}, step {step} of {steps}"):
            result = remat.verify(plain.model, planned.model, *example.args, **example.kwargs)
        if not result.ok:
            return tuple(f"step {step}: {difference}" for difference in result.differences)
        if step < steps:
            plain.train_step(seed + step)
            planned.train_step(seed + step)
    return ()
