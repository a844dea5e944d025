"""Levers as a training script of plain PyTorch, for `python` or `torchrun`.

In: levers, and what to train. Out: one file that stands by itself: it needs torch, and Remat only where Remat does
something (a plan, an optimizer on the host, a model of the zoo). Each lever adds its own lines and nothing else, so
that what is read is what is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from remat.fit.export.exported import Exported, ScriptTarget, offloaded
from remat.fit.levers import Levers, OptimizerKind, Precision, Recomputation, Zero

RANKS_OF_A_MACHINE = 8
_DTYPES = {Precision.FP16: "torch.float16", Precision.BF16: "torch.bfloat16"}


def write_script(levers: Levers, subject: ScriptTarget) -> Exported:
    parts = (_opening(levers, subject), _imports(levers, subject), _constants(levers, subject))
    functions = (
        _build(subject),
        _BLOCKS if _needs_blocks(levers) else "",
        _prepare(levers),
        _micro_batches(levers),
        _main(levers, subject),
    )
    bodies = (*(part for part in functions if part), 'if __name__ == "__main__":\n    main()')
    return Exported("\n\n".join(parts) + "\n\n\n" + "\n\n\n".join(bodies) + "\n")


def is_distributed(levers: Levers) -> bool:
    return levers.world > 1


def _is_replicated(levers: Levers) -> bool:
    return levers.world > 1 and not levers.zero.is_sharded


def _needs_blocks(levers: Levers) -> bool:
    return levers.zero.is_sharded or levers.recomputation is Recomputation.PER_BLOCK


def _opening(levers: Levers, subject: ScriptTarget) -> str:
    ranks = f"{levers.world} ranks" if is_distributed(levers) else "one device"
    target = "" if subject.target else " package.module:factory"
    return f'''"""Trains on {ranks}: {levers.label}.

    {_launcher(levers)} {subject.file}{target} --steps 100

Made by `remat fit`, yours to change. {_ABOUT_TARGET if subject.is_factory else _ABOUT_ZOO}
"""'''


_ABOUT_TARGET = """The target is a function that returns (model, args) or
(model, args, kwargs); called with them, the model gives its loss, or an output that has it as `loss`."""
_ABOUT_ZOO = "The model and its batch come from Remat's zoo."


def _launcher(levers: Levers) -> str:
    if not is_distributed(levers):
        return "python"
    machines, rest = divmod(levers.world, RANKS_OF_A_MACHINE)
    if machines <= 1 or rest:
        return f"torchrun --nproc-per-node {levers.world}"
    return (
        f"torchrun --nnodes {machines} --nproc-per-node {RANKS_OF_A_MACHINE} "
        "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    )


def _imports(levers: Levers, subject: ScriptTarget) -> str:
    standard = {"import argparse", "import itertools"}
    standard |= {"import importlib", "import os", "import sys"} if subject.is_factory else set()
    torch = {"import torch"}
    own = set() if subject.is_factory else {"from remat import zoo"}
    if is_distributed(levers):
        standard.add("import os")
        torch.add("import torch.distributed as dist")
    if _needs_blocks(levers):
        torch.add("from torch import nn")
    if levers.recomputation is Recomputation.PER_BLOCK:
        standard.add("from functools import partial")
        torch.add("from torch.utils.checkpoint import checkpoint")
    if _is_replicated(levers):
        torch.add("from torch.nn.parallel import DistributedDataParallel")
        standard |= {"import contextlib"} if levers.accumulation > 1 else set()
    if _is_replicated(levers) and levers.zero is Zero.OPTIMIZER:
        torch.add("from torch.distributed.optim import ZeroRedundancyOptimizer")
    if levers.zero.is_sharded:
        torch.add("from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict")
        torch.add("from torch.distributed.device_mesh import init_device_mesh")
        torch.add(f"from torch.distributed.fsdp import {', '.join(_sharding_names(levers))}")
    if levers.budget_bytes is not None or _offloads_by_remat(levers):
        own.add("import remat")
    return "\n\n".join("\n".join(_sorted(group)) for group in (standard, torch, own) if group)


def _sorted(lines: set[str]) -> list[str]:
    """`import x` before `from x import y`, each by name."""
    return sorted(lines, key=lambda line: (line.startswith("from"), line))


def _sharding_names(levers: Levers) -> Iterator[str]:
    if levers.offloads_optimizer:
        yield "CPUOffloadPolicy"
    if levers.has_masters:
        yield "MixedPrecisionPolicy"
    yield "fully_shard"


def _offloads_by_remat(levers: Levers) -> bool:
    return levers.offloads_optimizer and not levers.zero.is_sharded


def _constants(levers: Levers, subject: ScriptTarget) -> str:
    lines = [f"TARGET = {_quoted(subject.target)}"] if subject.target else []
    lines += [f"SIZES = {_dict(subject)}"] if subject.sizes else []
    lines += [f"RANKS, MICRO_BATCH, ACCUMULATION = {levers.world}, {levers.micro_batch}, {levers.accumulation}"]
    if levers.budget_bytes is not None:
        lines.append(f"BUDGET = {levers.budget_bytes}  # bytes of one rank, for the whole step")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _dict(subject: ScriptTarget) -> str:
    items = (
        f"{_quoted(name)}: {_quoted(size) if isinstance(size, str) else repr(size)}"
        for name, size in subject.sizes.items()
    )
    return "{" + ", ".join(items) + "}"


def _build(subject: ScriptTarget) -> str:
    sizes = "**SIZES" if subject.sizes else ""
    if not subject.is_factory:
        return f'''def build():
    """The model, and a batch from which every rank takes its samples."""
    example = zoo.build(TARGET{", " if sizes else ""}{sizes})
    return example.model, example.args, example.kwargs'''
    return f'''def build(target):
    """The model, and a batch from which every rank takes its samples."""
    module, _, factory = target.partition(":")
    sys.path.insert(0, os.getcwd())
    made = getattr(importlib.import_module(module), factory)({sizes})
    model, args, *rest = made if isinstance(made, tuple) else (made.model, made.args, made.kwargs)
    return model, args if isinstance(args, tuple) else (args,), rest[0] if rest else {{}}'''


_BLOCKS = '''def blocks(model):
    """The layers in lists of layers of one class, as those of a transformer."""
    found = []
    for child in model.children():
        layers = list(child.children())
        found += layers if is_list(child) and not any(map(is_list, layers)) else blocks(child)
    return found


def is_list(module):
    layers = list(module.children())
    is_alike = len(layers) > 1 and len({type(layer) for layer in layers}) == 1
    is_deep = all(list(layer.children()) for layer in layers)
    return isinstance(module, (nn.ModuleList, nn.Sequential)) and is_alike and is_deep'''


def _prepare(levers: Levers) -> str:
    return "\n".join(("def prepare(model, device, learning_rate):", *_indented(_prepare_lines(levers))))


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"    {line}" if line else "" for line in lines)


def _prepare_lines(levers: Levers) -> Iterator[str]:
    if levers.precision is Precision.PURE_BF16 and not (levers.has_masters and levers.zero.is_sharded):
        yield "model = model.to(torch.bfloat16)"
    if not levers.zero.is_sharded:
        yield "model = model.to(device)"
    if levers.recomputation is Recomputation.PER_BLOCK:
        yield "for block in blocks(model):"
        yield "    block.forward = partial(checkpoint, block.forward, use_reentrant=False)"
    if levers.zero.is_sharded:
        yield from _shard_lines(levers)
    if levers.budget_bytes is not None:
        offload = ', offload="cpu"' if levers.offloads_activations else ""
        yield f"model = remat.optimize(model, BUDGET{offload})"
    if _is_replicated(levers):
        yield "model = DistributedDataParallel(model, gradient_as_bucket_view=True)"
    yield from _optimizer_lines(levers)
    yield "return model, optimizer"


def _shard_lines(levers: Levers) -> Iterator[str]:
    yield "# Moves the weights to the device, shard by shard."
    yield 'shard = {"mesh": init_device_mesh(device.type, (RANKS,))}'
    if levers.zero is Zero.GRADIENTS:
        yield 'shard["reshard_after_forward"] = False'
    if levers.has_masters:
        yield "# Shards stay in fp32, and are the masters of what is gathered in bf16."
        yield 'shard["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)'
    if levers.offloads_optimizer:
        yield 'shard["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")'
    yield "for block in blocks(model):"
    yield "    fully_shard(block, **shard)"
    yield "fully_shard(model, **shard)"


def _optimizer_lines(levers: Levers) -> Iterator[str]:
    kind = "AdamW" if levers.optimizer.is_adam else "SGD"
    settings = "lr=learning_rate" + (", momentum=0.9" if levers.optimizer is OptimizerKind.MOMENTUM else "")
    if _is_replicated(levers) and levers.zero is Zero.OPTIMIZER:
        yield f"optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.{kind}, {settings})"
    else:
        yield f'optimizer = torch.optim.{kind}(model.parameters(), {settings}, fused=device.type == "cuda")'
    if _offloads_by_remat(levers):
        yield f"optimizer = {offloaded(levers)}"


def _micro_batches(levers: Levers) -> str:
    is_lowered = levers.precision is Precision.PURE_BF16 and not (levers.has_masters and levers.zero.is_sharded)
    lowered = "\n        item = item.to(torch.bfloat16) if item.is_floating_point() else item" if is_lowered else ""
    return f'''def micro_batches(args, kwargs, rank, device):
    """This rank's micro-batches, without end, from the rows of one batch: put your loader in its place."""
    tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor) and item.dim()]

    def part(item):
        if not isinstance(item, torch.Tensor):
            return item{lowered}
        return (item[rows] if item.dim() and len(item) == len(tensors[0]) else item).to(device)

    for start in itertools.count(rank * MICRO_BATCH, RANKS * MICRO_BATCH):
        rows = torch.arange(start, start + MICRO_BATCH, device=tensors[0].device) % len(tensors[0])
        yield tuple(map(part, args)), {{name: part(item) for name, item in kwargs.items()}}'''


def _main(levers: Levers, subject: ScriptTarget) -> str:
    lines = [
        *_option_lines(subject),
        *(_JOIN if is_distributed(levers) else _ALONE).splitlines(),
        *_start_lines(levers, subject),
        *_step_lines(levers),
        *_end_lines(levers),
    ]
    return "\n".join(("def main():", *_indented(lines)))


def _option_lines(subject: ScriptTarget) -> Iterator[str]:
    yield 'parser = argparse.ArgumentParser(description=__doc__.partition("\\n")[0])'
    if subject.is_factory:
        default = ', nargs="?", default=TARGET' if subject.target else ""
        yield f'parser.add_argument("target"{default}, help="package.module:factory")'
    yield 'parser.add_argument("--steps", type=int, default=100)'
    yield 'parser.add_argument("--learning-rate", type=float, default=1e-4)'
    yield 'parser.add_argument("--save", help="where to write the weights in the end")'
    yield "options = parser.parse_args()"


_ALONE = 'rank, device = 0, torch.device("cuda" if torch.cuda.is_available() else "cpu")'
_JOIN = """is_cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
if is_cuda:
    torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo")
rank = dist.get_rank()
if dist.get_world_size() != RANKS:
    raise SystemExit(f"This script is for {RANKS} ranks, and {dist.get_world_size()} were started.")"""


def _start_lines(levers: Levers, subject: ScriptTarget) -> Iterator[str]:
    yield ""
    yield "torch.manual_seed(0)  # the same weights on every rank" if is_distributed(levers) else "torch.manual_seed(0)"
    yield f"model, args, kwargs = build({'options.target' if subject.is_factory else ''})"
    yield "model, optimizer = prepare(model.train(), device, options.learning_rate)"
    if levers.has_scaler:
        yield "scaler = torch.amp.GradScaler(device.type)"
    yield "data = micro_batches(args, kwargs, rank, device)"
    if is_distributed(levers):
        yield "torch.manual_seed(1 + rank)  # other random numbers on each"


def _step_lines(levers: Levers) -> Iterator[str]:
    yield "for step in range(options.steps):"
    yield from _indented(_backward_lines(levers))
    update = ("scaler.step(optimizer)", "scaler.update()") if levers.has_scaler else ("optimizer.step()",)
    yield from _indented((*update, "optimizer.zero_grad()"))
    report = ('print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)',)
    yield from _indented(("if rank == 0:", *_indented(report)) if is_distributed(levers) else report)


def _backward_lines(levers: Levers) -> Iterable[str]:
    loss = "loss" if levers.accumulation == 1 else "loss / ACCUMULATION"
    if levers.has_scaler:
        loss = f"scaler.scale({loss})"
    elif levers.accumulation > 1:
        loss = f"({loss})"
    once: Iterable[str] = (*_forward_lines(levers), f"{loss}.backward()")
    if levers.accumulation == 1:
        return once
    if _is_replicated(levers):
        once = (
            "# Gradients are summed over ranks once, with the last micro-batch.",
            "with contextlib.nullcontext() if part == ACCUMULATION - 1 else model.no_sync():",
            *_indented(once),
        )
    return ("for part in range(ACCUMULATION):", *_indented(once))


def _forward_lines(levers: Levers) -> Iterator[str]:
    yield "args, kwargs = next(data)"
    calls = (
        "output = model(*args, **kwargs)",
        "loss = output if isinstance(output, torch.Tensor) else output.loss",
    )
    if levers.precision.is_autocast:
        yield f"with torch.autocast(device.type, {_DTYPES[levers.precision]}):"
        yield from _indented(calls)
    else:
        yield from calls


def _end_lines(levers: Levers) -> Iterator[str]:
    yield "if options.save:"
    if levers.zero.is_sharded:
        yield "    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)"
        yield "    weights = get_model_state_dict(model, options=whole)"
    else:
        yield f"    weights = {'model.module' if _is_replicated(levers) else 'model'}.state_dict()"
    yield "    if rank == 0:" if is_distributed(levers) else "    torch.save(weights, options.save)"
    if is_distributed(levers):
        yield "        torch.save(weights, options.save)"
        yield "dist.destroy_process_group()"
