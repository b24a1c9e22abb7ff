"""Rank processes with torch already imported: forked from a server, because the import takes seconds."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessContext, start_processes

from tests.support.processes import LIMIT_SECONDS, Forked, new_file, note_stacks, preload, stacks_of

preload("tests.support.warm")


def run_ranks(
    rank: Callable[..., None], world: int, *arguments: Any, backend: str = "gloo", limit: float = LIMIT_SECONDS
) -> None:
    """Call `rank(number, *arguments)` in `world` processes, as one process group if there are several.

    Raises TimeoutError if they run longer than `limit` seconds.
    """
    stacks = [new_file() for _ in range(world)]
    # The store listens before any rank starts: another process could take a port that is only known to be free.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = (world, store.port, backend, stacks, rank, arguments)
    join_in_time(start_processes(_join, shared, nprocs=world, join=False, start_method="forkserver"), stacks, limit)


def join_in_time(ranks: ProcessContext, stacks: Sequence[Path], seconds: float = LIMIT_SECONDS) -> None:
    """Wait for the ranks. Raises the exception of a failed rank, and TimeoutError with all stacks if ranks wait for
    each other."""
    until = time.monotonic() + seconds
    while not ranks.join(max(0.0, until - time.monotonic())):
        if time.monotonic() >= until:
            stuck = [number for number, process in enumerate(ranks.processes) if process.is_alive()]
            said = "\n".join(f"rank {n}, {stacks_of(ranks.processes[n].pid, stacks[n])}" for n in stuck)
            for process in ranks.processes:
                process.kill()
            raise TimeoutError(f"after {seconds:.0f} s ranks {stuck} have not ended\n{said}")


def start_rank(
    config: Path, number: int, world: int, port: int, folder: Path, prepare: Callable[[], object] | None = None
) -> Forked:
    """Start the rank program as torchrun would, as the only rank of its pod, after calling `prepare()`.

    The rank writes its outcome and its log into the folder. The folder is created.
    """
    folder.mkdir(exist_ok=True)
    return Forked(_train, config, number, world, port, folder, prepare, log=folder / "log")


def _train(
    config: Path, number: int, world: int, port: int, folder: Path, prepare: Callable[[], object] | None
) -> None:
    from pseudoreal_trainer.cli import rank as program

    torch.set_num_threads(1)
    _set_group(number, world, port)
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PSEUDOREAL_OUTCOME_DIRECTORY": str(folder)}
    if prepare is not None:
        prepare()
    program._exit_now(program.run_rank(config, program._exit_now).exit_code)


def _join(
    number: int,
    world: int,
    port: int,
    backend: str,
    stacks: Sequence[Path],
    rank: Callable[..., None],
    arguments: Any,
) -> None:
    note_stacks(stacks[number])
    torch.set_num_threads(1)
    if world > 1:
        _set_group(number, world, port)
        store = TCPStore("127.0.0.1", port)
        # As in training, the group has a device: groups on GPUs are split off from this group.
        device = torch.device("cuda", number) if backend == "nccl" else None
        dist.init_process_group(backend, store=store, rank=number, world_size=world, device_id=device)
    rank(number, *arguments)
    if world > 1:
        dist.destroy_process_group()


def _set_group(number: int, world: int, port: int) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update(address, RANK=str(number), WORLD_SIZE=str(world))
