"""What `doctor` saw, in words about the user's code: what is wrong, where, and what to do."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from remat.core.budget import format_bytes
from remat.core.results.diagnosis import Finding, FindingKind
from remat.errors import InfeasibleBudget
from remat.pytorch._compat.tensors import has_backward_hooks
from remat.pytorch._compat.trace_report import Stop
from remat.pytorch.measure.subject import is_lightning

_STOPS = (
    (r"`print`", "it prints", "Print after the step, or not at all."),
    (
        r"Tensor\.item|[Dd]ata.dependent|dynamic control flow|Dynamic control flow|\.tolist|\.numpy\(",
        "it reads values out of a tensor while the step runs",
        "Decide with tensors, as torch.where does, or read the values after the step.",
    ),
    (
        r"backwards? hooks?",
        "a hook waits for gradients that pass {modules}",
        "Remove the hook while you train under a budget, or register it on parameters instead.",
    ),
    (
        r"recurrent layers",
        "recurrent layers run as they are on CUDA and where the step is compiled",
        "Nothing: the layers around it are planned.",
    ),
    (
        r"torch\.compiler\.disable",
        "it is marked with torch.compiler.disable",
        "Remove the mark if the code can be traced; the code around it is planned.",
    ),
    (
        r"torch\.func|functorch|vmap",
        "it uses a transform of torch.func, which cannot be planned",
        "Compute this gradient with torch.autograd.grad, or keep it out of the optimized step.",
    ),
)
"""By Dynamo's words: what the line does, and what to do about it."""
_MOVE = "Move it out of the step's forward, or write it with tensor operations; the code around it is planned."

_WARNINGS = (
    (
        r"transform of torch\.func",
        FindingKind.LEFT_OUT,
        "Call the plain model there, or compute the gradient with torch.autograd.grad.",
    ),
    (r"over its budget", FindingKind.BUDGET, "Raise the budget by that much, or lower the batch."),
    (r"runs unplanned", FindingKind.LEFT_OUT, "Rewrite that part, or optimize the rest of the model without it."),
    (r"retain_graph=True", FindingKind.WARNING, "Leave out retain_graph=True if one backward is enough."),
    (r"is_compiling|so that it may take", FindingKind.WARNING, "Give the budget in bytes."),
    (r"outputs that were dropped", FindingKind.WARNING, "Keep the same outputs in every step."),
    (r"received one: this backward", FindingKind.WARNING, "Go backward from the same outputs in every step."),
    (r"could not be measured", FindingKind.WARNING, "Nothing, unless the step is slow: its time is estimated."),
    (r"^The cache ", FindingKind.WARNING, "Repair or delete the file, or set REMAT_CACHE_DIR."),
)
_NOT_PLANNED = "Not planned, runs as before: "
_TOLD_ELSEWHERE = ("Nothing of this step could be captured", "Dynamo does not know how to trace")


def of_stop(stop: Stop, step: Any) -> Finding:
    """A place that cannot be traced: the line as it is written, and what about it cannot be."""
    known = ((words, advice) for pattern, words, advice in _STOPS if re.search(pattern, stop.reason))
    words, advice = next(known, (_explanation(stop.reason), _MOVE))
    source = linecache.getline(stop.file, stop.line).strip() if stop.file else ""
    what = f"{f'`{source}`' if source else 'A part of the step'} runs unplanned: {_filled(words, step)}"
    what += ", and with it the whole function around it." if stop.leaves_function else "."
    return Finding(FindingKind.NOT_TRACED, what, advice, _place(stop.file, stop.line))


def _filled(words: str, step: Any) -> str:
    modules = step.named_modules() if isinstance(step, nn.Module) else ()
    hooked = [f"`{name}`" if name else "the model" for name, module in modules if has_backward_hooks(module)]
    return words.format(modules=", ".join(hooked) or "a module") if "{modules}" in words else words


def _explanation(reason: str) -> str:
    """Dynamo's own, without its hints."""
    lines = [line.strip() for line in reason.strip().split("\n")]
    explained = next(
        (line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), lines[0]
    )
    return explained.rstrip(".")


def _place(file: str, line: int) -> str:
    if not file:
        return ""
    near = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
    return f"{near}:{line}"


def of_warning(text: str, *, is_told: bool) -> Finding | None:
    """What Remat or a library warned of, which plain PyTorch did not; None where findings say more already."""
    if text.startswith(_TOLD_ELSEWHERE) or (is_told and text.startswith(_NOT_PLANNED)):
        return None
    if text.startswith(_NOT_PLANNED):
        what = f"A part of the step runs unplanned: {text.removeprefix(_NOT_PLANNED)}"
        return Finding(FindingKind.NOT_TRACED, what, _MOVE)
    text = re.sub(r"^A graph of \d+ nodes runs unplanned: ", "A part of the step is traced, but runs unplanned: ", text)
    text = re.sub(r"DataDependent\w+: .*", "it reads values out of a tensor.", text)
    known = ((kind, advice) for pattern, kind, advice in _WARNINGS if re.search(pattern, text))
    kind, advice = next(known, (FindingKind.WARNING, "Look it up under Errors and warnings in the documentation."))
    return Finding(kind, text, advice)


def of_error(error: Exception) -> Finding:
    reason = str(error).strip().split("\n")[0]
    return Finding(
        FindingKind.LEFT_OUT,
        f"The step runs plainly and raises under a budget: {type(error).__name__}: {reason}",
        "Report this with your model; until then, optimize a part of it.",
    )


def of_nothing_planned(step: Any, *, goes_back: bool) -> Finding:
    what = "Nothing is planned: no forward that needs gradients was seen."
    advice = "Check that parameters require gradients, and that the step is not under torch.no_grad()."
    if is_lightning(step):
        what = "Nothing is planned: training_step does not call the module itself."
        advice = "Optimize the module that training_step calls, as self.net = remat.optimize(self.net, budget)."
    elif not goes_back and not isinstance(step, nn.Module):
        what = "The function does not go backward, and only what waits for backward is planned."
        advice = "Call loss.backward() in the function, or give the module and its batch."
    return Finding(FindingKind.LEFT_OUT, what, advice)


def of_no_plan(steps: int) -> Finding:
    return Finding(
        FindingKind.LEFT_OUT,
        f"No plan was made in {steps} steps: each part that was captured runs with the least memory that it can.",
        "Make every step alike and let it end in loss.backward(); then change what the other findings name.",
    )


def of_refused(error: InfeasibleBudget) -> Finding:
    return Finding(
        FindingKind.BUDGET,
        # Which op sets the floor is nothing that a user wrote.
        re.sub(r" \(op `.*?`\)", "", str(error).split(";")[0]) + ".",
        f"Give {error.min_budget} bytes ({format_bytes(error.min_budget)}) or more, or lower the batch.",
    )


def of_excess(measured_bytes: int, budget_bytes: int) -> Finding:
    over = format_bytes(measured_bytes - budget_bytes)
    return Finding(
        FindingKind.BUDGET,
        f"The step needed {format_bytes(measured_bytes)}, {over} over its budget.",
        "Give as much less as a margin, and see what is not planned above: it is not counted ahead of time.",
    )


def of_plain_too_large() -> Finding:
    return Finding(
        FindingKind.NOT_COMPARED,
        "The plain step does not fit this device, so its bits are not known.",
        "Compare once with a smaller batch that fits plainly.",
    )


def of_differences(differences: Sequence[str], *, repeats: bool) -> Finding:
    if not repeats:
        return Finding(
            FindingKind.NOT_COMPARED,
            "The plain step does not give the same bits twice, so it cannot be compared.",
            "Keep what changes from step to step in buffers, and use deterministic algorithms on CUDA.",
        )
    more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
    return Finding(
        FindingKind.BITS,
        f"Other bits than in plain PyTorch: {differences[0]}{more}.",
        "See Correctness in the documentation for known differences; if it is none of them, report it.",
    )


def of_recaptures(captures: Sequence[int], reasons: Sequence[str]) -> Finding:
    """Which steps were captured anew, and the first thing that was not as before."""
    again = [str(number) for number, count in enumerate(captures, 1) if number > 1 and count]
    what = f"Captured again in step{'s' if len(again) > 1 else ''} {', '.join(again)}"
    reason = re.sub(r"^\d+/\d+: ", "", (*reasons, "")[0])
    condition = _plain_names(reason.partition("  # ")[0])
    what += f": `{condition}` held before." if condition else "."
    places = re.findall(r'File "(.+?)", line (\d+)', reason)
    advice = "Keep what changes from step to step in tensors; each capture takes time and memory."
    return Finding(FindingKind.RECAPTURED, what, advice, _place(places[-1][0], int(places[-1][1])) if places else "")


def _plain_names(condition: str) -> str:
    """Dynamo writes the names of variables as `L['x']`, and where it found the module."""
    return re.sub(r"[LG]\['(\w+)'\]", r"\1", condition).replace("step.__self__", "self").strip()
