"""Speeds of memory, host copies, the disk, and messages between ranks."""

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pseudoreal_api.spec.optimizer import Optimizer
from torch import Tensor

from pseudoreal_trainer.accelerator.adapters import found_accelerators, kind_of
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.state.direct_file import DirectFile, Piece, aligned_buffer
from pseudoreal_trainer.engine.state.memory import AdamW, Slices
from pseudoreal_trainer.engine.state.pinned import allocator_for
from pseudoreal_trainer.estimate.time.hardware import Collectives, TransferSpeed
from pseudoreal_trainer.measure.timing import line_through, seconds_of, seconds_together
from pseudoreal_trainer.plan.memory.tiers import threads_of_updates
from pseudoreal_trainer.plan.sizes import Device
from pseudoreal_trainer.plan.update_ranges import UpdateRange

_SMALL = 2**14
"""Size in bytes of the smaller of the two transfers from which latency and speed are computed."""
MOST_BYTES = 2**31
"""Maximum size in bytes of a vector in memory. Units are as large and exceed every cache; a few MiB would measure the
cache."""
_SHARE_OF_MEMORY = 8
"""Divisor: all vectors of one measurement together take at most the free memory divided by this number."""
DISK_BYTES = 2**26
"""Size in bytes of a transfer to or from a disk: enough to keep as many requests pending as the engine does, for a
while."""
_COLLECTIVE_BYTES: dict[Device, int] = {"accelerator": 2**29, "cpu": 2**23}
"""Kind of device -> size in bytes of a collective's vector. Between processes on a CPU, messages are far slower than
any cache."""
_CLIP = 0.999
_MEMORY = Path("/proc/meminfo")
_CPU = torch.device("cpu")
_PRODUCT_ROWS = 1024


def vector_bytes(device: torch.device, ranks: int, vectors: float) -> int:
    """Return the size in bytes of a vector, if each of `ranks` ranks of one machine measures with `vectors` vectors."""
    free = _available_bytes() // ranks if device.type == "cpu" else torch.accelerator.get_memory_info(device)[0]
    return min(MOST_BYTES, int(free / _SHARE_OF_MEMORY / vectors)) // 4096 * 4096


def _available_bytes() -> int:
    """Return the free bytes of the host, including reclaimable file caches; half of its memory where the system tells
    no more."""
    try:
        lines = _MEMORY.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024


def memory_bytes_per_second(device: torch.device, ranks: int) -> float:
    """Return the bytes of memory moved per second by an in-place float32 sum, with two reads for each write."""
    elements = vector_bytes(device, ranks, 2) // 4
    total, part = (torch.ones(elements, device=device) for _ in range(2))
    return 3 * total.nbytes / seconds_of(lambda: total.add_(part), device)


def update_seconds_per_element(device: torch.device, ranks: int) -> float:
    """Return the seconds per element for the optimizer's update of a bfloat16 unit, including gradient clipping and the
    cast of the new weights."""
    elements = vector_bytes(device, ranks, 4.5) // 4
    weights, first, second, gradient = (torch.ones(elements, device=device) for _ in range(4))
    compute = torch.empty(elements, dtype=torch.bfloat16, device=device)
    # As in training: beside accelerators, updates on the host leave cores to the threads that launch.
    beside: Device = "accelerator" if found_accelerators() else "cpu"
    adamw = AdamW(threads=threads_of_updates(torch.get_num_threads(), beside))
    slices = Slices(weights, first, second, gradient, compute, (UpdateRange(0, elements, decay=0.1),))
    return seconds_of(lambda: adamw.update(Optimizer(), slices, 1, 1e-3, _CLIP), device) / elements


def host_flops_per_second() -> float:
    """Return the operations per second of a float32 product of square matrices on the host."""
    a, b, out = (torch.ones(_PRODUCT_ROWS, _PRODUCT_ROWS) for _ in range(3))
    return 2 * _PRODUCT_ROWS**3 / seconds_of(lambda: torch.mm(a, b, out=out), _CPU)


def copies(source: torch.device, target: torch.device, ranks: int) -> TransferSpeed:
    """Return the speed of copies from `source` to `target`. One end is the device, the other is host memory. The host
    memory is pinned if the device is a GPU."""
    device = target if source == _CPU else source
    host = allocator_for(device)
    size = min(vector_bytes(_CPU, ranks, 2), vector_bytes(device, ranks, 2))
    pinned = host.allocate(size)
    other = torch.ones(size, dtype=torch.uint8, device=device)
    a, b = (pinned, other) if source == _CPU else (other, pinned)

    def timed(size: int) -> tuple[int, float]:
        return size, seconds_of(lambda: b[:size].copy_(a[:size], non_blocking=True), device)

    line = line_through(timed(_SMALL), timed(size))
    host.free(pinned)
    return line


def disk() -> tuple[TransferSpeed, TransferSpeed]:
    """Return the speeds of reading and writing a file in the folder for temporary files, bypassing the page cache if
    the file system can."""
    with tempfile.TemporaryDirectory(prefix="pseudoreal-") as folder:
        file = DirectFile(Path(folder), DISK_BYTES)
        small, large = aligned_buffer(_SMALL), aligned_buffer(DISK_BYTES)

        def line(act: Callable[[Sequence[Piece]], None]) -> TransferSpeed:
            times = [(len(buffer), seconds_of(partial(act, [(0, buffer)]), _CPU)) for buffer in (small, large)]
            return line_through(*times)

        written, read = line(file.write), line(file.read)
        file.close()
    return read, written


def collectives(ranks: Ranks) -> Collectives:
    """Return the speeds of the collectives over all ranks, in bytes sent by each rank."""
    world, large = ranks.world, _COLLECTIVE_BYTES[kind_of(ranks.device)]
    part = (world - 1) / world

    def line(act: Callable[[Tensor, Tensor], object], share: float) -> TransferSpeed:
        """Return the speed of a collective. `act`: called with a whole vector and a shard of the vector. `share`: share
        of the whole vector that each rank sends."""

        def timed(size: int) -> tuple[int, float]:
            shard = torch.ones(size // 4 // world, device=ranks.device)
            whole = torch.ones(len(shard) * world, device=ranks.device)
            return round(whole.nbytes * share), seconds_together(lambda: act(whole, shard), ranks)

        return line_through(timed(_SMALL), timed(large))

    return Collectives(
        ranks=world,
        all_gather=line(lambda whole, shard: dist.all_gather_into_tensor(whole, shard), part),
        reduce_scatter=line(lambda whole, shard: dist.reduce_scatter_tensor(shard, whole), part),
        all_reduce=line(lambda whole, _: dist.all_reduce(whole), 2 * part),
    )


def point_to_point(ranks: Ranks) -> TransferSpeed:
    """Return the speed of messages from each rank to the next in a ring, all at the same time."""
    after, before = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world

    def timed(size: int) -> tuple[int, float]:
        mine, theirs = (torch.ones(size // 4, device=ranks.device) for _ in range(2))

        def act() -> None:
            messages = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, theirs, before)]
            for work in dist.batch_isend_irecv(messages):
                work.wait()

        return size, seconds_together(act, ranks)

    return line_through(timed(_SMALL), timed(_COLLECTIVE_BYTES[kind_of(ranks.device)]))


def agree_seconds(ranks: Ranks) -> float:
    """Return the seconds of an agreement over the hosts' network (gloo), as in the engine."""
    values = torch.zeros(3, dtype=torch.float64)
    group: Any = dist.new_group(backend="gloo")
    return seconds_together(lambda: dist.all_reduce(values, group=group), ranks)
