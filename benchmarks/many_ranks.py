"""Processes that train together over gloo on one machine, each with a cache of its own, telling what it saw."""

from __future__ import annotations

import os
import queue
import socket
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(
    work: Callable[..., Any],
    *args: Any,
    world: int,
    timeout_s: float = 300,
    wait_s: float = 900,
    awaited: Sequence[int] | None = None,
) -> list[Any]:
    """What `work(rank, *args)` returns on each rank, or the text of what it raised; None where a rank told nothing.

    Where only some are `awaited`, the others are ended when these have told.
    """
    context = mp.get_context("spawn")
    results = context.Queue()
    with socket.socket() as free, tempfile.TemporaryDirectory() as caches:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        processes = [
            context.Process(target=_process, args=(rank, world, port, timeout_s, caches, results, work, args))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        found = _gathered(results, processes, wait_s, range(world) if awaited is None else awaited)
        for process in processes:
            process.join(5 if awaited is None else 0)
            if process.is_alive():
                process.kill()
    return [found.get(rank) for rank in range(world)]


def _gathered(results: Any, processes: list[Any], wait_s: float, awaited: Sequence[int]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    waited = 0.0
    while not found.keys() >= set(awaited) and waited < wait_s:
        try:
            rank, said = results.get(timeout=1)
            found[rank] = said
        except queue.Empty:
            waited += 1
            if all(not process.is_alive() for rank, process in enumerate(processes) if rank not in found):
                break
    return found


def _process(
    rank: int, world: int, port: int, timeout_s: float, caches: str, results: Any, work: Callable[..., Any], args: Any
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), REMAT_CACHE_DIR=str(Path(caches) / str(rank)))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
    try:
        results.put((rank, work(rank, *args)))
    except Exception as error:
        traceback.print_exc()
        results.put((rank, f"{type(error).__name__}: {error}"))
    finally:
        results.close()
        results.join_thread()
        # The others may be gone, and with them the store.
        os._exit(0)
