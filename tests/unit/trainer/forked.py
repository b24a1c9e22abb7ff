"""Processes that know torch already: forked from a server that imports it once, where each would need seconds.

They have the environment of the server, not the one of the test.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, start_processes

from tests.ports import free_port

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.unit.trainer.warm"])
MOST_SECONDS = 900.0


def run_ranks(rank: Callable[..., None], world: int, *arguments: Any, backend: str = "gloo") -> None:
    """Calls `rank(number, *arguments)` in `world` processes, which are one process group if they are several."""
    join_in_time(
        start_processes(
            _join, (world, free_port(), backend, rank, arguments), nprocs=world, join=False, start_method="forkserver"
        )
    )


def join_in_time(ranks: ProcessContext, seconds: float = MOST_SECONDS) -> None:
    """Raises what a process raised, and TimeoutError for processes that do not end: ranks that wait for each other."""
    until = time.monotonic() + seconds
    while not ranks.join(max(0.0, until - time.monotonic())):
        if time.monotonic() >= until:
            stuck = [number for number, process in enumerate(ranks.processes) if process.is_alive()]
            for process in ranks.processes:
                process.kill()
            raise TimeoutError(f"after {seconds:.0f} s ranks {stuck} have not ended")


def _join(number: int, world: int, port: int, backend: str, rank: Callable[..., None], arguments: Any) -> None:
    torch.set_num_threads(1)
    if world > 1:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        os.environ.update(address, RANK=str(number), WORLD_SIZE=str(world))
        # As ranks that train do: groups on GPUs are split off from this one.
        device = torch.device("cuda", number) if backend == "nccl" else None
        dist.init_process_group(backend, device_id=device)
    rank(number, *arguments)
    if world > 1:
        dist.destroy_process_group()
