"""One plan on all ranks: with cold caches, where ranks differ, and what a meeting of many takes."""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

from benchmarks.many_ranks import run_ranks
from benchmarks.ranks.models import RESULTS, plan_digest, world_size
from benchmarks.runs import save_results

CONNECTIONS = 64
"""To the store of a simulation: opening a thousand in one process takes minutes."""


def add_to(modes: Any) -> None:
    found = modes.add_parser("agree")
    found.add_argument("--runs", type=int, default=20)
    found.set_defaults(run=agreements)
    found = modes.add_parser("growth")
    found.add_argument("--worlds", default="8,64,256,1024")
    found.set_defaults(run=growth)


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

    is_other = rank == world_size() - 1
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

    ranks = Ranks(dist.PrefixStore("bench", store_of_job()), rank, tuple(range(world_size())), 60.0)
    dist.barrier()
    began = time.perf_counter()
    together = Together(ranks)
    with together.attending():
        agree(together)
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


class CountedStore:
    """Counts what one rank asks of a store; looks for what has not been written yet are counted apart."""

    def __init__(self, store: Any) -> None:
        self.store, self.exchanges, self.looks, self.moved_bytes = store, 0, 0, 0

    def set(self, key: str, value: Any) -> None:
        self.exchanges, self.moved_bytes = self.exchanges + 1, self.moved_bytes + len(value)
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        # A store's own wait would hold up all ranks of a connection, and among them the one that is waited for.
        while not self.store.check([key]):
            time.sleep(0.001)
        value: bytes = self.store.get(key)
        self.exchanges, self.moved_bytes = self.exchanges + 1, self.moved_bytes + len(value)
        return value

    def add(self, key: str, amount: int) -> int:
        self.exchanges += 1
        return int(self.store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        is_there = bool(self.store.check(keys))
        self.exchanges, self.looks = self.exchanges + is_there, self.looks + (not is_there)
        return is_there


def growth(options: argparse.Namespace) -> None:
    """Threads stand for ranks, over a few connections to one TCP store: their turns are most of the time, so what they
    ask of the store is counted too.
    """
    rows = []
    for count in map(int, options.worlds.split(",")):
        rows.append({"ranks": count, **simulated(count)})
        print(rows[-1], flush=True)
    law = {}
    for what in ("seconds", "exchanges"):
        power, factor = fitted([(row["ranks"], row[what]) for row in rows])
        law[what] = {"factor": factor, "power": power}
        print(f"{what}: {factor:.3g} times ranks to the power of {power:.2f}")
    save_results(RESULTS / "distributed_growth.json", {"rows": rows, "law": law})


def simulated(count: int) -> dict[str, float]:
    import threading

    import torch.distributed as dist

    from remat.distributed.agreement import vigil
    from remat.distributed.agreement.agreed import Together
    from remat.distributed.agreement.ranks import Ranks

    # Ranks that share one interpreter have no time to look for each other every second, as processes do.
    vigil.LOOK_S = 60.0
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(min(count, CONNECTIONS))]
    stores = [CountedStore(clients[place % CONNECTIONS]) for place in range(count)]
    ready, failed = threading.Barrier(count + 1), []

    def work(place: int) -> None:
        ready.wait()
        try:
            together = Together(Ranks(stores[place], place, tuple(range(count)), 120.0))
            with together.attending():
                agree(together)
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
    return {
        "seconds": time.perf_counter() - began,
        "exchanges": sum(store.exchanges for store in stores),
        "of_the_first": stores[0].exchanges,
        "most_of_another": max(store.exchanges for store in stores[1:]),
        "looks": sum(store.looks for store in stores),
        "moved_bytes": sum(store.moved_bytes for store in stores),
    }


def fitted(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Power and factor of the law with the least squares of logarithms: threads of one process wait for each other."""
    import math
    import statistics

    line = statistics.linear_regression(*([math.log(point[place]) for point in points] for place in (0, 1)))
    return line.slope, math.exp(line.intercept)
