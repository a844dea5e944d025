"""Two processes that train together over gloo, each telling what it saw."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_two(work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(rank, *args)` returns in each of two processes, by rank."""
    context = mp.get_context("spawn")
    results = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = mp.start_processes(_process, (port, results, work, args), nprocs=2, join=False, start_method="spawn")
    found = dict(results.get(timeout=300) for _ in range(2))
    while not processes.join():
        pass
    return [found[0], found[1]]


def _process(rank: int, port: int, results: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        results.put((rank, work(rank, *args)))
    finally:
        dist.destroy_process_group()
