"""One rank of a measurement, run while the other ranks do the same."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.estimate.time.hardware import Collectives, PassSpeed, Speeds, TransferSpeed
from pseudoreal_trainer.measure import transfers
from pseudoreal_trainer.measure.overhead import pass_seconds
from pseudoreal_trainer.measure.passes import is_slow, measure_cell, rows
from pseudoreal_trainer.threads import threads_of

Say = Callable[[str], None]
_CPU = torch.device("cpu")
_NOWHERE = TransferSpeed(latency_seconds=0, bytes_per_second=1e12)
"""Speed of messages for a single rank, which sends none."""


def tasks(device: torch.device) -> int:
    """Return the number of progress messages of a rank."""
    return len(rows(device)) + 3


def measure(rank: int, world: int, device_type: str, folder: Path, say: Say) -> None:
    """Measure as one rank among others; the first rank writes the speeds to the folder."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        # Before anything is pinned: pinning creates a context on the current device, by default the first one.
        torch.cuda.set_device(device)
    torch.set_num_threads(threads_of(world))
    ranks = Ranks(rank, world, device)
    if world > 1:
        # All ranks are on this machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        rendezvous = f"file://{folder}/rendezvous-{world}"
        backend = "nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world)
    speeds = _speeds(ranks, say)
    if ranks.is_first:
        result(folder, world).write_text(speeds.model_dump_json())
    if world > 1:
        dist.destroy_process_group()


def result(folder: Path, world: int) -> Path:
    return folder / f"speeds-{world}.json"


def _speeds(ranks: Ranks, say: Say) -> Speeds:
    device, on_gpu = ranks.device, ranks.device.type == "cuda"
    passes = _passes(ranks, say)
    say("memory, copies and the optimizer")
    on_device = transfers.update_seconds_per_element(device, ranks.world)
    h2d, d2h = (transfers.copies(*ends, ranks.world) for ends in ((_CPU, device), (device, _CPU)))
    memory = transfers.memory_bytes_per_second(device, ranks.world)
    say("the disk and the engine itself")
    disk_read, disk_write = transfers.disk()
    overhead = pass_seconds(device)
    say("messages and collectives")
    groups, point_to_point, agree = _between(ranks)
    return Speeds(
        ranks=ranks.world,
        passes=passes,
        pass_seconds=overhead,
        memory_bytes_per_second=memory,
        update_on_device_seconds_per_element=on_device,
        update_on_host_seconds_per_element=transfers.update_seconds_per_element(_CPU, ranks.world)
        if on_gpu
        else on_device,
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
            ranks.from_first(0)  # wait for all ranks, which then measure at the same time
            found.append(measure_cell(cell, ranks.device))
            if ranks.from_first(int(is_slow(cell, found[-1]))):
                break
    return found


def _between(ranks: Ranks) -> tuple[list[Collectives], TransferSpeed, float]:
    if ranks.world == 1:
        return [], _NOWHERE, 0.0
    return [transfers.collectives(ranks)], transfers.point_to_point(ranks), transfers.agree_seconds(ranks)
