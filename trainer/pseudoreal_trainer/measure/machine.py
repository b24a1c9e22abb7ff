"""Two measurements of a machine: with one rank, and with one rank per device (without a GPU, per core), at most 8
ranks.

All ranks of a measurement measure at the same time, each in a separate process.
"""

import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from pseudoreal_trainer.accelerator.adapters import adapter_of, found_accelerators
from pseudoreal_trainer.cgroups import threads_of, usable_processors
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.estimate.time.hardware import Collectives, HardwareProfile, PassSpeed, Speeds, TransferSpeed
from pseudoreal_trainer.measure import transfers
from pseudoreal_trainer.measure.overhead import pass_seconds
from pseudoreal_trainer.measure.passes import is_slow, measure_cell, rows
from pseudoreal_trainer.portable import loopback_interface

Say = Callable[[str], None]
_CPU = torch.device("cpu")
_NOWHERE = TransferSpeed(latency_seconds=0, bytes_per_second=1e12)
"""Placeholder for the speed of messages of a single rank: a single rank sends none."""


def messages_of_rank(device: torch.device) -> int:
    """Return the number of progress messages of a rank."""
    return len(rows(device)) + 3


def measure_as_rank(rank: int, world: int, device_type: str, folder: Path, say: Say) -> None:
    """Measure as one rank among others; the first rank writes the speeds to the folder."""
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
    if device_type != "cpu":
        # Before anything is pinned: pinning creates a context on the current device, by default device 0.
        torch.accelerator.set_device_index(device)
    torch.set_num_threads(threads_of(world))
    ranks = Ranks(rank, world, device)
    if world > 1:
        # All ranks are on this machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
        rendezvous = f"file://{folder}/rendezvous-{world}"
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world)
    speeds = _speeds(ranks, say)
    if ranks.is_first:
        speeds_file(folder, world).write_text(speeds.model_dump_json(), encoding="utf-8")
    if world > 1:
        dist.destroy_process_group()


def speeds_file(folder: Path, world: int) -> Path:
    return folder / f"speeds-{world}.json"


def _speeds(ranks: Ranks, say: Say) -> Speeds:
    device = ranks.device
    passes = _passes(ranks, say)
    say("memory, copies and the optimizer")
    on_device = transfers.update_seconds_per_element(device, ranks.world)
    h2d, d2h = (transfers.copies(*ends, ranks.world) for ends in ((_CPU, device), (device, _CPU)))
    memory = transfers.memory_bytes_per_second(device, ranks.world)
    say("the disk and the engine itself")
    disk_read, disk_write = transfers.disk()
    overhead = pass_seconds(device)
    say("messages and collectives")
    groups, point_to_point, agree = _measure_messages(ranks)
    return Speeds(
        ranks=ranks.world,
        passes=passes,
        pass_seconds=overhead,
        memory_bytes_per_second=memory,
        update_on_device_seconds_per_element=on_device,
        update_on_host_seconds_per_element=on_device
        if device.type == "cpu"
        else transfers.update_seconds_per_element(_CPU, ranks.world),
        host_flops_per_second=transfers.host_flops_per_second(),
        h2d=h2d,
        d2h=d2h,
        disk_read=disk_read,
        disk_write=disk_write,
        point_to_point=point_to_point,
        collectives=groups,
        agree_seconds=agree,
    )


def _passes(ranks: Ranks, say: Say) -> list[PassSpeed]:
    found = []
    for row in rows(ranks.device):
        say(f"passes in {row[0].compute}, hidden {row[0].hidden}")
        for cell in row:
            ranks.from_first(0)  # a barrier: all ranks measure at the same time
            found.append(measure_cell(cell, ranks.device))
            if ranks.from_first(int(is_slow(cell, found[-1]))):
                break
    return found


def _measure_messages(ranks: Ranks) -> tuple[list[Collectives], TransferSpeed, float]:
    if ranks.world == 1:
        return [], _NOWHERE, 0.0
    return [transfers.collectives(ranks)], transfers.point_to_point(ranks), transfers.agree_seconds(ranks)


_MOST_RANKS = 8
DEVICE_RESERVE = 2 * 2**30
"""Device bytes not available to tensors: the CUDA context, memory of cuBLAS, and fragmentation in torch's allocator.
Communicators are counted with the layout (`plan.memory.communicators`)."""
Progress = Callable[[str], None]


def measurements() -> int:
    """Return the number of progress messages of `measure_machine`."""
    return len(_rank_counts()) * messages_of_rank(_device())


def measure_machine(progress: Progress) -> HardwareProfile:
    """Return the profile of this machine. Raises the error of a failed rank."""
    device = _device()
    on_cpu = device.type == "cpu"
    # As in the pods: threads that spin while they wait would steal time from the other ranks.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory(prefix="pseudoreal-") as folder:
        speeds = [_measure_with(ranks, Path(folder), progress) for ranks in _rank_counts()]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return HardwareProfile(
        name=f"{platform.node()}, {usable_processors()} cores" if on_cpu else adapter_of(device).name,
        overlaps=not on_cpu,
        device_bytes=None if on_cpu else torch.accelerator.get_memory_info(device)[1] - DEVICE_RESERVE,
        host_bytes=memory // max(_rank_counts()),
        speeds=speeds,
    )


def _device() -> torch.device:
    """Return the first accelerator; the CPU on a machine without one."""
    return next(iter(found_accelerators()), _CPU)


def _rank_counts() -> list[int]:
    most = len(found_accelerators()) or usable_processors()
    return sorted({1, min(most, _MOST_RANKS)})


def _measure_with(ranks: int, folder: Path, progress: Progress) -> Speeds:
    said: Any = multiprocessing.get_context("spawn").SimpleQueue()
    arguments = (ranks, _device().type, folder, said)
    context: Any = multiprocessing.spawn(_run, arguments, nprocs=ranks, join=False)  # type: ignore[attr-defined, no-untyped-call]
    while not context.join(timeout=0.1):
        while not said.empty():
            progress(f"{ranks} rank{'s' if ranks > 1 else ''}: {said.get()}")
    return Speeds.model_validate_json(speeds_file(folder, ranks).read_bytes())


def _run(rank: int, world: int, device_type: str, folder: Path, said: Any) -> None:
    measure_as_rank(rank, world, device_type, folder, said.put if rank == 0 else _ignore)


def _ignore(_: str) -> None:
    pass
