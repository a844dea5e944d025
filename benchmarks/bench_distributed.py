"""Many devices: bits, peaks and plans of steps that several ranks train together.

    python -m benchmarks.bench_distributed sweep [--worlds 2,4] [--models gpt,resnet] [--steps 10]
    python -m benchmarks.bench_distributed agree [--runs 20]
    python -m benchmarks.bench_distributed growth [--worlds 8,64,256,1024]
    python -m benchmarks.bench_distributed pretend
    python -m benchmarks.bench_distributed failures
    python -m benchmarks.bench_distributed pipelines [--worlds 2,4] [--micros 4,8] [--kinds gpipe,1f1b,interleaved]
    python -m benchmarks.bench_distributed bubbles
    python -m benchmarks.bench_distributed gathers [--ranks 8] [--points 6]
    python -m benchmarks.bench_distributed reshard
    python -m benchmarks.bench_distributed compiled
    python -m benchmarks.bench_distributed device      on one CUDA device, as rank 0 of 8

`sweep` trains plainly and under budgets with DDP, FSDP2 and ZeRO-1 over gloo: losses of every step and parameters at
the end must have equal bits, no step may need more than its budget, and the prediction is compared with what is
measured. `agree` starts ranks with cold caches of their own and compares their plans. `growth` simulates the meeting of
many ranks by threads over one TCP store. `pretend` compares one process that pretends to be rank 0 with real ranks.
`failures` kills and stops ranks. `pipelines` trains stages over gloo under several schedules, plainly and under
budgets, and `bubbles` times steps that compute again while they wait against the same ones that do not. `gathers`
compares plans that may gather parameters again with those that always or never do, and trains with one of them;
`reshard` does so for FSDP2. `compiled` trains with torch.compile's kernels under DDP and FSDP2. `device` trains 1.3
billion parameters as rank 0 of 8 pretended ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.many_ranks import run_ranks
from benchmarks.runs import save_results

RESULTS = Path(__file__).parent / "results"
SIZES = {
    "gpt": ("gpt", dict(batch=16, length=64, vocabulary=64, width=96, depth=6, heads=4, dropout=0.1)),
    "resnet": ("resnet18", dict(batch=16, side=64, classes=10, width=16, shrink=1)),
}
HOWS = ("ddp inside", "ddp outside", "fsdp keep inside", "fsdp keep outside", "fsdp free inside", "fsdp free outside")
BLOCKS = ("Block", "Residual")
CONNECTIONS = 8
"""To the store of a simulation: one process cannot open a thousand at once."""


def sharded(model: Any, root: Any, *, frees: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (_world(),))
    for module in model.modules():
        if type(module).__name__ in BLOCKS:
            fully_shard(module, mesh=mesh, reshard_after_forward=frees)
    return fully_shard(root, mesh=mesh, reshard_after_forward=frees)


def _world() -> int:
    import torch.distributed as dist

    return dist.get_world_size()


def built(how: str, model: Any, share: str | None) -> Any:
    """A model trained in one of the ways of `HOWS`, under a budget or plainly."""
    from torch.nn.parallel import DistributedDataParallel

    import remat

    engine, order = how.rsplit(" ", 1)
    within = model if share is None or order == "outside" else remat.optimize(model, share)
    if engine in ("ddp", "zero1"):
        whole = DistributedDataParallel(within, bucket_cap_mb=0.5)
    else:
        whole = sharded(model, within, frees=engine.endswith("free"))
    return remat.optimize(whole, share) if share is not None and order == "outside" else whole


def optimizer_for(how: str, model: Any) -> Any:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if how.startswith("zero1"):
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def digest(model: Any) -> str:
    """Of all that this rank holds of the parameters and buffers."""
    import torch

    found = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def plan_digest(plan: Any) -> str:
    """Of what runs, and of what it may need; each rank holds a part of its own size."""
    return hashlib.sha256(repr((plan.schedule, plan.budget_bytes, plan.fingerprint)).encode()).hexdigest()[:12]


def trained(rank: int, how: str, name: str, share: str | None, steps: int) -> dict[str, Any]:
    import torch

    import remat
    from remat import zoo

    torch.manual_seed(0)
    family, sizes = SIZES[name]
    example = zoo.build(family, **sizes)
    model = built(how, example.model, share)
    optimizer = optimizer_for(how, model)

    def batch(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(example.args[0]), generator=generator)
        return [item[order] for item in example.args]

    losses, began = [], time.perf_counter()
    torch.manual_seed(rank)
    for number in range(steps):
        loss = model(*batch(100 * number + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = time.perf_counter() - began
    data = batch(rank)
    kept = [optimizer]

    def step() -> None:
        model(*data).backward()
        kept[0].zero_grad()

    bits, peaks = digest(model), [remat.measure(step).peak_bytes for _ in range(3)]
    found = {"losses": losses, "bits": bits, "peaks": peaks, "seconds": seconds}
    if share is not None:
        plan = remat.plan_of(model)
        found |= {"budget": plan.budget_bytes, "predicted": plan.predicted_peak, "plain": plan.plain_peak_bytes}
        found |= {"plan": plan_digest(plan), "overhead": plan.overhead}
        found |= {"breakdown": dict(plan.breakdown_bytes)}
    return found


def trained_all(rank: int, how: str, name: str, shares: list[str], steps: int) -> dict[str, Any]:
    """Plainly and under each budget, in one process."""
    warnings.simplefilter("ignore")
    plain = trained(rank, how, name, None, steps)
    return {"plain": plain, **{share: trained(rank, how, name, share, steps) for share in shares}}


def judged(how: str, name: str, world: int, share: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    plain, ours = [item["plain"] for item in ranks], [item[share] for item in ranks]
    off = [abs(item["predicted"] / max(item["peaks"]) - 1) for item in ours]
    return {
        "how": how,
        "model": name,
        "world": world,
        "budget": share,
        "bits_equal": all(
            (a["losses"], a["bits"]) == (b["losses"], b["bits"]) for a, b in zip(plain, ours, strict=True)
        ),
        "within_budget": all(max(item["peaks"]) <= item["budget"] for item in ours),
        "one_plan": len({item["plan"] for item in ours}) == 1,
        "largest_error_percent": round(100 * max(off), 2),
        "peaks": [item["peaks"] for item in ours],
        "plain_peaks": [item["peaks"] for item in plain],
        "predicted": [item["predicted"] for item in ours],
        "budget_bytes": [item["budget"] for item in ours],
        "overhead_percent": round(100 * ours[0]["overhead"], 2),
    }


def sweep(options: argparse.Namespace) -> None:
    path = RESULTS / "distributed_sweep.json"
    for world in map(int, options.worlds.split(",")):
        for name in options.models.split(","):
            for how in options.hows.split(","):
                shares = options.budgets.split(",")
                found = run_ranks(trained_all, how, name, shares, options.steps, world=world)
                if all(isinstance(item, dict) for item in found):
                    rows = [judged(how, name, world, share, found) for share in shares]
                else:
                    asked = {"how": how, "model": name, "world": world}
                    rows = [{**asked, "budget": share, "failed": str(found)[:500]} for share in shares]
                for row in rows:
                    print(*(row[key] for key in row if key not in UNSHOWN), flush=True)
                    keep(path, row)


UNSHOWN = ("peaks", "plain_peaks", "predicted", "budget_bytes")


def keep(path: Path, row: dict[str, Any]) -> None:
    """Put a row in the place of the one for the same case, if there is one."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def case(item: dict[str, Any]) -> tuple[Any, ...]:
        return item["world"], item["model"], item["how"], item["budget"]

    save_results(path, sorted([*(item for item in rows if case(item) != case(row)), row], key=case))


def agreed_once(rank: int) -> dict[str, Any]:
    """One cold planning of a small model under DDP."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import remat
    from remat import zoo

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    example = zoo.build("gpt", depth=3, dropout=0.0)
    model = DistributedDataParallel(remat.optimize(example.model, "0.6x", time_limit=3.0))
    model(*example.args).backward()
    return {"plan": plan_digest(remat.plan_of(model)), "budget": remat.plan_of(model).budget_bytes}


def differing(rank: int, what: str) -> dict[str, Any]:
    """The last rank trains something else: what every rank is told, and after how long."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import remat

    is_other = rank == _world() - 1
    torch.manual_seed(0)
    layers: list[Any] = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)]
    if what == "model" and is_other:
        layers[1] = torch.nn.GELU()
    if what == "version" and is_other:
        torch.__version__ = "0.0.1"
    share = "0.9x" if what == "budget" and is_other else "0.8x"
    model = DistributedDataParallel(remat.optimize(torch.nn.Sequential(*layers), share))
    began = time.perf_counter()
    try:
        model(torch.randn(64, 64)).sum().backward()
    except remat.RematError as error:
        return {"told": f"{type(error).__name__}: {error}", "seconds": time.perf_counter() - began}
    return {"told": "", "seconds": time.perf_counter() - began}


def exchanged(rank: int) -> float:
    """Seconds of one whole agreement whose answers are there at once: a meeting, costs, two numbers and a plan."""
    import torch.distributed as dist

    from remat.distributed.agreement.agreed import Together
    from remat.distributed.agreement.ranks import Ranks
    from remat.pytorch._compat.distributed import store_of_job

    ranks = Ranks(dist.PrefixStore("bench", store_of_job()), rank, tuple(range(_world())), 60.0)
    dist.barrier()
    began = time.perf_counter()
    agree(Together(ranks))
    seconds = time.perf_counter() - began
    # The first rank holds the store.
    dist.barrier()
    return seconds


def agree(together: Any) -> None:
    from remat.core.problem import Costs
    from remat.distributed.agreement.facts import Facts

    facts = Facts("0.1", "2.13", "cpu", "8", "0.6x", "auto", "", "300 parameters", "float32[8, 64], " * 300, "abc")
    together.meet(lambda: (facts, 1000))
    costs = Costs(tuple(0.1 * number for number in range(2000)), tuple(range(2000)), tuple(range(3000)))
    together.costs("graph", lambda: costs)
    together.number("plain", lambda: 5)
    together.number("plan of a size", lambda: len(str(costs)))


def agreements(options: argparse.Namespace) -> None:
    seconds = [max(run_ranks(exchanged, world=8)) for _ in range(3)]
    print("agreement of 8 processes", seconds, flush=True)
    plans = []
    for number in range(options.runs):
        found = run_ranks(agreed_once, world=2)
        plans.append([item["plan"] if isinstance(item, dict) else str(item) for item in found])
        print(number, plans[-1], flush=True)
    told = {}
    for what in ("model", "version", "budget"):
        told[what] = run_ranks(differing, what, world=4)
        print(what, told[what], flush=True)
    one = sum(len(set(plan)) == 1 for plan in plans)
    results = {"runs": options.runs, "one_plan": one, "plans": plans, "told": told, "seconds_of_8_processes": seconds}
    save_results(RESULTS / "distributed_agreement.json", results)


def growth(options: argparse.Namespace) -> None:
    """Threads stand for ranks, over a few connections to one TCP store: their turns are part of the time."""
    rows = [{"ranks": count, "seconds": simulated(count)} for count in map(int, options.worlds.split(","))]
    for row in rows:
        print(row)
    slope, start = fitted([(row["ranks"], row["seconds"]) for row in rows])
    print(f"{1e3 * start:.0f} ms and {1e3 * slope:.2f} ms for each rank")
    law = {"seconds_at_0": start, "seconds_per_rank": slope}
    save_results(RESULTS / "distributed_growth.json", {"rows": rows, "law": law})


def simulated(count: int) -> float:
    import threading

    import torch.distributed as dist

    from remat.distributed.agreement.agreed import Together
    from remat.distributed.agreement.ranks import Ranks

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(min(count, CONNECTIONS))]
    ready, failed = threading.Barrier(count + 1), []

    def work(place: int) -> None:
        ready.wait()
        try:
            agree(Together(Ranks(clients[place % CONNECTIONS], place, tuple(range(count)), 120.0)))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(count)]
    for thread in threads:
        thread.start()
    ready.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return time.perf_counter() - began


def fitted(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Slope and start of the line with the least squares."""
    import statistics

    line = statistics.linear_regression([point[0] for point in points], [point[1] for point in points])
    return line.slope, line.intercept


def peak_of(name: str, engine: str, plan_file: str | None = None) -> list[int]:
    """Peaks of three steps of a rank, real or pretended, plainly or under a plan that was made before."""
    import torch

    import remat
    from remat import zoo
    from remat.distributed.pretended import optimizer_of, parallel

    torch.manual_seed(0)
    family, sizes = SIZES[name]
    example = zoo.build(family, **sizes)
    model = parallel(example.model, engine)
    optimizer = optimizer_of(model, engine, 1e-3)
    if plan_file is not None:
        model = remat.apply(model, remat.Plan.load(plan_file))
    kept = [optimizer]

    def step() -> None:
        model(*example.args).backward()
        kept[0].zero_grad()

    for _ in range(3):
        model(*example.args).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [remat.measure(step).peak_bytes for _ in range(3)]


def real_peak(rank: int, name: str, engine: str, plan_file: str | None) -> list[int]:
    warnings.simplefilter("ignore")
    return peak_of(name, engine, plan_file)


def pretend(options: argparse.Namespace) -> None:
    import tempfile

    import torch

    from remat import zoo
    from remat.distributed.pretended import plan_pretended, pretended

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for world in map(int, options.worlds.split(",")):
        for name, engine in ((name, engine) for name in SIZES for engine in ("ddp", "zero1", "fsdp", "fsdp:keep")):
            with tempfile.TemporaryDirectory() as folder:
                torch.manual_seed(0)
                family, sizes = SIZES[name]
                example = zoo.build(family, **sizes)
                asked = {"engine": engine, "ranks": world, "budget": "0.7x"}
                made = plan_pretended(example.model, example.args, example.kwargs, **asked)
                file = str(Path(folder) / "plan.json")
                made.plan.save(Path(file))
                row: dict[str, Any] = {"model": name, "engine": engine, "world": world}
                row |= {"predicted": made.plan.predicted_peak}
                for what, given in (("plain", None), ("planned", file)):
                    with pretended(world):
                        row[f"{what}_pretended"] = peak_of(name, engine, given)
                    row[f"{what}_real"] = run_ranks(real_peak, name, engine, given, world=world)[0]
            rows.append(row)
            print(row, flush=True)
            save_results(RESULTS / "distributed_pretended.json", rows)


def failing(rank: int, how: str, signal_name: str, when: str) -> dict[str, Any]:
    """Rank 1 gets a signal in the middle of a step, or while ranks plan; the others tell what they saw, and when."""
    import os
    import signal
    import threading

    import torch

    import remat
    from remat import zoo

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    example = zoo.build("gpt", depth=3, dropout=0.0)
    model = built(how, example.model, "0.7x")
    began = time.time()
    path = Path(os.environ["REMAT_CACHE_DIR"]).parent / "signalled"

    def hit() -> None:
        path.write_text(str(time.time()))
        os.kill(os.getpid(), getattr(signal, signal_name))

    try:
        for number in range(6):
            if rank == 1 and number == (4 if when == "step" else 0):
                threading.Timer({"step": 0.05, "before planning": 0.0, "planning": 3.0}[when], hit).start()
                if when == "before planning":
                    time.sleep(2)
            model(*example.args).backward()
            model.zero_grad()
    except (RuntimeError, remat.RematError) as error:
        since = time.time() - (float(path.read_text()) if path.exists() else began)
        return {"told": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}", "seconds": round(since, 2)}
    return {"told": "", "seconds": -1.0}


def failures(options: argparse.Namespace) -> None:
    rows = []
    for how in ("ddp inside", "fsdp free outside"):
        cases = ((name, when) for when in ("step", "before planning", "planning") for name in ("SIGKILL", "SIGSTOP"))
        for signal_name, when in cases:
            asked = how, signal_name, when
            found = run_ranks(failing, *asked, world=2, timeout_s=options.timeout, wait_s=120, awaited=[0])
            rows.append(
                {"how": how, "signal": signal_name, "when": when, "timeout_s": options.timeout, "rank 0": found[0]}
            )
            print(rows[-1], flush=True)
    save_results(RESULTS / "distributed_failures.json", rows)


def pipelines(options: argparse.Namespace) -> None:
    """Losses, bits and peaks of stages; each case several times where asked."""
    from benchmarks.pipeline_ranks import trained as trained_stages

    path, shares = RESULTS / "distributed_pipelines.json", options.budgets.split(",")
    worlds, micros = (list(map(int, item.split(","))) for item in (options.worlds, options.micros))
    cases = [(world, kind, micro) for world in worlds for kind in options.kinds.split(",") for micro in micros]
    for world, kind, micro in cases:
        for _ in range(options.runs):
            found = run_ranks(trained_stages, world, kind, micro, shares, options.steps, world=world)
            for share in shares:
                row = judged_stages(kind, world, micro, share, found)
                print(*(row[key] for key in row if key not in UNSHOWN), flush=True)
                keep_run(path, row)


def judged_stages(kind: str, world: int, micros: int, share: str, ranks: list[Any]) -> dict[str, Any]:
    asked = {"kind": kind, "world": world, "micro_batches": micros, "budget": share}
    if not all(isinstance(item, dict) for item in ranks):
        return {**asked, "failed": str(ranks)[:500]}
    plain, ours = [item["plain"] for item in ranks], [item[share] for item in ranks]
    pairs = list(zip(plain, ours, strict=True))
    return {
        **asked,
        "equal": all((one["losses"], one["bits"]) == (other["losses"], other["bits"]) for one, other in pairs),
        "within_budget": all(max(item["peaks"]) <= item["budget"] for item in ours),
        "largest_error_percent": round(100 * max(abs(item["predicted"] / max(item["peaks"]) - 1) for item in ours), 3),
        "largest_plain_error_percent": round(
            100 * max(abs(other["plain"] / max(one["peaks"]) - 1) for one, other in pairs), 3
        ),
        "in_flight": [item["in_flight"] for item in ours],
        "overhead_percent": [round(100 * max(item["overhead"]), 2) for item in ours],
        "peaks": [item["peaks"] for item in ours],
        "plain_peaks": [item["peaks"] for item in plain],
        "predicted": [item["predicted"] for item in ours],
        "budget_bytes": [item["budget"] for item in ours],
    }


def keep_run(path: Path, row: dict[str, Any]) -> None:
    """Add a run to those of its case: how many there were, how many crashed, and the worst of each figure."""
    case = ("kind", "world", "micro_batches", "budget")
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    before = next((item for item in rows if all(item[key] == row[key] for key in case)), {})
    counted = {"runs": before.get("runs", 0) + 1, "crashes": before.get("crashes", 0) + ("failed" in row)}
    if "failed" in before or ("failed" not in row and "equal" in before):
        row = {**row, "equal": row["equal"] and before.get("equal", True)}
        row["within_budget"] = row["within_budget"] and before.get("within_budget", True)
        for key in ("largest_error_percent", "largest_plain_error_percent"):
            row[key] = max(row[key], before.get(key, 0.0))
    others = [item for item in rows if item is not before]
    ordered = sorted([*others, {**before, **row, **counted}], key=lambda item: [str(item[key]) for key in case])
    save_results(path, ordered)


def bubbles(options: argparse.Namespace) -> None:
    """Steps whose stages compute again while they wait, against the same ones that do not."""
    import statistics

    from benchmarks.pipeline_ranks import timed

    rows = []
    for kind, micros in (("gpipe", 2), ("1f1b", 2), ("gpipe", 4)):
        found = run_ranks(timed, 2, kind, micros, options.budget, options.rounds, world=2)
        filled, unfilled = (statistics.median(found[0][f"{way}_s"]) for way in ("filled", "unfilled"))
        early = [event for event in found[0]["trace"] if event[0].startswith("remat")]
        row = {"kind": kind, "micro_batches": micros, "budget": options.budget, "rounds": options.rounds}
        row |= {"filled_s": filled, "unfilled_s": unfilled, "ratio": filled / unfilled}
        row |= {"fastest_ratio": found[0]["filled_s"][0] / found[0]["unfilled_s"][0]}
        row |= {key: found[0][key] for key in ("early_ms", "predicted_filled_ms", "predicted_unfilled_ms")}
        row |= {"early_in_trace": len(early), "trace_of_rank_0": found[0]["trace"]}
        rows.append(row)
        print({key: row[key] for key in row if key != "trace_of_rank_0"}, flush=True)
        save_results(RESULTS / "distributed_bubbles.json", rows)


def gathers(options: argparse.Namespace) -> None:
    """Predictions at many budgets, and steps over gloo: bits and peaks."""
    from benchmarks.gathers import LINKS, compared, trained_sharded

    rows = []
    for link in LINKS:
        rows += compared(options.ranks, link, options.points, options.seconds)
        print(link, [row["never_slower"] for row in rows[-options.points :]], flush=True)
    ran = []
    plain = run_ranks(trained_sharded, None, 5, world=2)
    for share in options.budgets.split(","):
        found = run_ranks(trained_sharded, share, 5, world=2)
        row: dict[str, Any] = {"budget": share, "world": 2, **{key: found[0][key] for key in ("again", "gathers")}}
        row["bits_equal"] = [(item["losses"], item["bits"]) for item in found] == [
            (item["losses"], item["bits"]) for item in plain
        ]
        row["within_budget"] = all(max(item["peaks"]) <= item["budget"] for item in found)
        row["largest_error_percent"] = round(
            100 * max(abs(item["predicted"] / max(item["peaks"]) - 1) for item in found), 2
        )
        ran.append(row)
        print(row, flush=True)
        save_results(RESULTS / "distributed_gathers.json", {"predicted": rows, "ran": ran})


def reshard(options: argparse.Namespace) -> None:
    """Which blocks of FSDP2 keep their parameters, against all of them and none."""
    from benchmarks.gathers import resharded

    rows = []
    for share in options.budgets.split(","):
        found = run_ranks(resharded, share, world=2)
        rows.append({"budget": share, "world": 2, "ranks": found})
        print(rows[-1], flush=True)
    save_results(RESULTS / "distributed_reshard.json", rows)


def compiled(options: argparse.Namespace) -> None:
    """torch.compile's kernels under DDP and FSDP2: losses within 1e-5 of plain eager's, peaks within the budget."""
    from benchmarks.gathers import trained_compiled

    rows = []
    for how in ("ddp inside", "fsdp keep outside"):
        found = run_ranks(trained_compiled, how, "0.8x", options.steps, world=2, wait_s=600)
        rows.append({"how": how, "ranks": found})
        print(rows[-1], flush=True)
        save_results(RESULTS / "distributed_compiled.json", rows)


def device(options: argparse.Namespace) -> None:
    """1.3 billion parameters as rank 0 of 8 on one CUDA device: predicted against what the allocator tells."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import remat
    from remat.distributed.pretended import blocks_of, pretended
    from remat.zoo.gpt import GPT

    rows = []
    width, depth, heads = (2048, 24, 16) if options.scale == "full" else (256, 4, 4)
    for frees in (True, False):
        for share in options.budgets.split(","):
            with pretended(8):
                torch.manual_seed(0)
                mesh = init_device_mesh(options.device, (8,))
                with torch.device(options.device):
                    model = GPT(vocabulary=50304, length=1024, width=width, depth=depth, heads=heads, dropout=0.0)
                    tokens = torch.randint(50304, (options.batch, 1025))
                count = sum(item.numel() for item in model.parameters())
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
                for block in blocks_of(model):
                    fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=frees)
                fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=frees)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
                planned = remat.optimize(model, share) if share != "plain" else model
                batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
                peaks = [cuda_step(planned, batch, optimizer, options.device) for _ in range(6)]
                row: dict[str, Any] = {"parameters": count, "reshard": frees, "budget": share, "peaks": peaks}
                if share != "plain":
                    plan = remat.plan_of(planned)
                    row |= {"predicted": plan.predicted_peak, "budget_bytes": plan.budget_bytes}
                    row |= {"plain": plan.plain_peak_bytes, "overhead": plan.overhead}
                    row |= {"breakdown": dict(plan.breakdown_bytes)}
                    if peaks[-1]:
                        row["error_percent"] = round(100 * (plan.predicted_peak / max(peaks[-2:]) - 1), 2)
            rows.append(row)
            print(row, flush=True)
            del model, planned, optimizer, tokens, batch
            if options.device == "cuda":
                torch.cuda.empty_cache()
    name = torch.cuda.get_device_name() if options.device == "cuda" else ""
    if options.scale == "full":
        save_results(RESULTS / "distributed_device.json", rows, name)


def cuda_step(model: Any, batch: Any, optimizer: Any, device: str) -> int:
    """The peak of forward and backward; the optimizer's own temporaries are not in a plan."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    model(*batch).backward()
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    optimizer.step()
    optimizer.zero_grad()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    found = modes.add_parser("sweep")
    found.add_argument("--worlds", default="2,4")
    found.add_argument("--models", default="gpt,resnet")
    found.add_argument("--budgets", default="0.8x,0.6x")
    found.add_argument("--hows", default=",".join((*HOWS, "zero1 inside")))
    found.add_argument("--steps", type=int, default=10)
    found.set_defaults(run=sweep)
    found = modes.add_parser("agree")
    found.add_argument("--runs", type=int, default=20)
    found.set_defaults(run=agreements)
    found = modes.add_parser("growth")
    found.add_argument("--worlds", default="8,64,256,1024")
    found.set_defaults(run=growth)
    found = modes.add_parser("pretend")
    found.add_argument("--worlds", default="2,4")
    found.set_defaults(run=pretend)
    found = modes.add_parser("failures")
    found.add_argument("--timeout", type=float, default=10.0)
    found.set_defaults(run=failures)
    found = modes.add_parser("pipelines")
    found.add_argument("--worlds", default="2,4")
    found.add_argument("--micros", default="4,8")
    found.add_argument("--kinds", default="gpipe,1f1b,interleaved")
    found.add_argument("--budgets", default="0.7x")
    found.add_argument("--steps", type=int, default=4)
    found.add_argument("--runs", type=int, default=1)
    found.set_defaults(run=pipelines)
    found = modes.add_parser("bubbles")
    found.add_argument("--budget", default="0.45x")
    found.add_argument("--rounds", type=int, default=15)
    found.set_defaults(run=bubbles)
    found = modes.add_parser("gathers")
    found.add_argument("--ranks", type=int, default=8)
    found.add_argument("--points", type=int, default=5)
    found.add_argument("--seconds", type=float, default=2.0)
    found.add_argument("--budgets", default="0.8x,0.6x")
    found.set_defaults(run=gathers)
    found = modes.add_parser("reshard")
    found.add_argument("--budgets", default="0.8x")
    found.set_defaults(run=reshard)
    found = modes.add_parser("compiled")
    found.add_argument("--steps", type=int, default=5)
    found.set_defaults(run=compiled)
    found = modes.add_parser("device")
    found.add_argument("--budgets", default="plain,0.8x,0.6x")
    found.add_argument("--batch", type=int, default=8)
    found.add_argument("--device", default="cuda")
    found.add_argument("--scale", choices=("full", "small"), default="full")
    found.set_defaults(run=device)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
