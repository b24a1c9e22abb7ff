"""Speeds of memory, the host, the disk, and of what ranks say to each other."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pseudoreal_api.model_spec import Optimizer
from torch import Tensor

from pseudoreal_trainer.engine.adamw import AdamW, Slices
from pseudoreal_trainer.engine.direct_file import DirectFile, aligned_buffer
from pseudoreal_trainer.engine.ranks import Ranks
from pseudoreal_trainer.measure.timing import line_through, seconds_of, seconds_together
from pseudoreal_trainer.plan.hardware import Collectives, Transfer

_SMALL, _LARGE = 2**14, 2**23
"""Bytes of a transfer."""
_ELEMENTS = 2**22
_CPU = torch.device("cpu")


def memory_bytes_per_second(device: torch.device) -> float:
    """Of a sum in place, float32: two are read, one is written."""
    total, part = (torch.ones(_ELEMENTS, device=device) for _ in range(2))
    return 3 * total.nbytes / seconds_of(lambda: total.add_(part), device)


def update_seconds_per_element(device: torch.device) -> float:
    weights, first, second, gradient = (torch.ones(_ELEMENTS, device=device) for _ in range(4))
    adamw = AdamW()
    slices = Slices(weights, first, second, gradient, None, decayed=_ELEMENTS)
    steps = torch.ones((), device=device)
    return seconds_of(lambda: adamw.update(Optimizer(), slices, steps, 1e-3, 1.0), device) / _ELEMENTS


def copies(source: torch.device, target: torch.device) -> Transfer:
    """Between host memory that is locked, where there is a device, and the device."""

    def timed(size: int) -> tuple[int, float]:
        pinned = source.type != target.type
        a = torch.ones(size, dtype=torch.uint8, device=source, pin_memory=pinned and source == _CPU)
        b = torch.ones(size, dtype=torch.uint8, device=target, pin_memory=pinned and target == _CPU)
        return size, seconds_of(lambda: b.copy_(a, non_blocking=True), target if target != _CPU else source)

    return line_through(timed(_SMALL), timed(_LARGE))


def disk() -> tuple[Transfer, Transfer]:
    """To read and to write, in the folder for temporary files, past the page cache where the file system can."""
    with tempfile.TemporaryDirectory(prefix="pseudoreal-") as folder:
        file = DirectFile(Path(folder), _LARGE)
        small, large = aligned_buffer(_SMALL), aligned_buffer(_LARGE)

        def line(act: Callable[[int, Tensor], None]) -> Transfer:
            times = [(len(buffer), seconds_of(partial(act, 0, buffer), _CPU)) for buffer in (small, large)]
            return line_through(*times)

        written, read = line(file.write), line(file.read)
        file.close()
    return read, written


def collectives(ranks: Ranks) -> Collectives:
    """Of all ranks. For the bytes that each sends."""
    world = ranks.world
    part = (world - 1) / world

    def line(act: Callable[[Tensor, Tensor], object], share: float) -> Transfer:
        """`act` gets a whole vector and a shard of it; each rank sends `share` of the whole."""

        def timed(size: int) -> tuple[int, float]:
            shard = torch.ones(size // 4 // world, device=ranks.device)
            whole = torch.ones(len(shard) * world, device=ranks.device)
            return round(whole.nbytes * share), seconds_together(lambda: act(whole, shard), ranks)

        return line_through(timed(_SMALL), timed(_LARGE))

    return Collectives(
        ranks=world,
        all_gather=line(lambda whole, shard: dist.all_gather_into_tensor(whole, shard), part),
        reduce_scatter=line(lambda whole, shard: dist.reduce_scatter_tensor(shard, whole), part),
        all_reduce=line(lambda whole, _: dist.all_reduce(whole), 2 * part),
    )


def point_to_point(ranks: Ranks) -> Transfer:
    """From each rank to the next, around, all at the same time."""
    after, before = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world

    def timed(size: int) -> tuple[int, float]:
        mine, theirs = (torch.ones(size // 4, device=ranks.device) for _ in range(2))

        def act() -> None:
            messages = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, theirs, before)]
            for work in dist.batch_isend_irecv(messages):
                work.wait()

        return size, seconds_together(act, ranks)

    return line_through(timed(_SMALL), timed(_LARGE))


def agree_seconds(ranks: Ranks) -> float:
    """By the network of the hosts, as the engine agrees."""
    values = torch.zeros(3, dtype=torch.float64)
    group: Any = dist.new_group(backend="gloo")
    return seconds_together(lambda: dist.all_reduce(values, group=group), ranks)
