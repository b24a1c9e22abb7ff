"""The processes that train together, and the few things that they say to each other."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from pseudoreal_trainer.tell.stamps import Stamps


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    device: torch.device
    stamps: Stamps = field(default_factory=Stamps, compare=False)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replaces the tensor by its sum over all ranks: the same bits on each."""
        if self.world > 1:
            with self.stamps.wait("sum over all ranks"):
                dist.all_reduce(tensor)
        return tensor

    def from_first(self, value: int) -> int:
        """The value that the first rank has. Also a barrier."""
        return int(self.sum_(torch.tensor(value if self.is_first else 0, device=self.device)).item())


@contextmanager
def open_ranks(stamps: Stamps | None = None) -> Iterator[Ranks]:
    """Under torchrun all its processes; without it, this one alone."""
    stamps = stamps or Stamps()
    world, device = int(os.environ.get("WORLD_SIZE", "1")), device_of_rank()
    if world == 1:
        yield Ranks(0, 1, device, stamps)
        return
    with stamps.wait("rendezvous of all ranks"):
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    yield Ranks(dist.get_rank(), world, device, stamps)
    # Not after an error: the other ranks may wait inside collectives, and leaving the group would wait for them.
    dist.destroy_process_group()


def device_of_rank() -> torch.device:
    """Of this process; that of CUDA becomes the current one."""
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # Two ranks on one GPU would make NCCL fail; the CPU is slow, but right.
    if torch.cuda.device_count() < local_ranks:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
