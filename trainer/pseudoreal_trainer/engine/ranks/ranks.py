"""The processes that train together, and small collectives over all of them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pseudoreal_trainer.accelerator.adapters import adapter_of, found_accelerators
from pseudoreal_trainer.accelerator.environment import may_take_found
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.runtime.heartbeat import Heartbeat


@dataclass(frozen=True)
class Ranks:
    """The ranks of the job, from the point of view of one of them."""

    rank: int
    world: int
    device: torch.device
    heartbeat: Heartbeat = field(default_factory=Heartbeat, compare=False)
    limit: timedelta | None = None
    """Timeout of the collectives of every group; None: torch's default."""

    def __post_init__(self) -> None:
        has_number = self.device.type == "cpu" or self.device.index is not None
        assert has_number, "other threads make the rank's device current, which takes the device's number"

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace the tensor by its sum over all ranks, with the same bits on each. Collective."""
        if self.world > 1:
            with self.heartbeat.waiting("sums over all ranks"):
                dist.all_reduce(tensor)
        return tensor

    def total(self, value: int) -> int:
        """Return the sum of all ranks' values. Collective: no rank returns before all have called this."""
        return int(self.sum_(torch.tensor(value, device=self.device)).item())

    def from_first(self, value: int) -> int:
        """Return the first rank's value. Collective: no rank returns before all have called this."""
        return self.total(value if self.is_first else 0)

    def digest_from_first(self, digest: str) -> str:
        """Return the first rank's SHA-256, in hexadecimal; the other ranks pass an empty string. Collective: no rank
        returns before all have called this."""
        octets = list(bytes.fromhex(digest)) if self.is_first else [0] * 32
        return bytes(self.sum_(torch.tensor(octets, device=self.device)).tolist()).hex()

    def least_device_memory(self) -> int | None:
        """Return the bytes of memory of the smallest of all ranks' devices; None on CPUs. Collective: no rank returns
        before all have called this."""
        if self.device.type == "cpu":
            return None
        sizes = torch.zeros(self.world, dtype=torch.int64, device=self.device)
        _, sizes[self.rank] = torch.accelerator.get_memory_info(self.device)
        return int(self.sum_(sizes).min().item())


@contextmanager
def open_ranks(heartbeat: Heartbeat | None = None, *, gpus: int = 0, limit: timedelta | None = None) -> Iterator[Ranks]:
    """Yield the ranks that train together: all processes of torchrun, or this process alone. `gpus`: number of
    accelerators that the pod requests. Raises TrainingError if a rank that should have one has none."""
    heartbeat = heartbeat or Heartbeat()
    world, device = int(os.environ.get("WORLD_SIZE", "1")), device_of_rank(gpus)
    if world == 1:
        yield Ranks(0, 1, device, heartbeat, limit)
        return
    with heartbeat.waiting("meets all ranks"):
        _join(device, limit)
    yield Ranks(dist.get_rank(), world, device, heartbeat, limit)
    # Skipped after an error: the other ranks may wait inside collectives, and `destroy_process_group` would wait for
    # these ranks.
    dist.destroy_process_group()


def _join(device: torch.device, limit: timedelta | None) -> None:
    store, rank, world = next(rendezvous("env://", timeout=limit or default_pg_timeout))
    check_devices(store, rank, world, device, limit)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        store=PrefixStore("ranks", store),
        rank=rank,
        world_size=world,
        timeout=limit,
        # With a device, NCCL connects all ranks here, where a failure is easy to attribute. `split_group` needs a
        # device, too.
        device_id=None if device.type == "cpu" else device,
    )


def check_devices(store: Store, rank: int, world: int, device: torch.device, limit: timedelta | None = None) -> None:
    """Raise TrainingError on all ranks if some of them have an accelerator and others have none. Collective.

    Such ranks would communicate through different networks, and wait for each other until the limit.
    """
    kind = "CPU" if device.type == "cpu" else "GPU"
    store.set(f"a rank with a {kind}", str(rank))
    if store.add("ranks", 1) == world:
        store.set("all ranks", "are here")
    store.wait(["all ranks"], limit or default_pg_timeout)
    kinds = [kind for kind in ("GPU", "CPU") if store.check([f"a rank with a {kind}"])]
    if len(kinds) > 1:
        with_gpu, without = (store.get(f"a rank with a {kind}").decode() for kind in kinds)
        raise TrainingError(
            f"rank {with_gpu} has a GPU and rank {without} has none: ask for GPUs in phases[].resources.limits, so that"
            " every pod gets them, or look at the driver of the node of a pod that asked"
        )


def device_of_rank(gpus: int = 0) -> torch.device:
    """Return the device of this process; an accelerator becomes the current device.

    `gpus`: number of accelerators that the pod requests. 0: the CPU, unless `may_take_found` and torch finds an
    accelerator for each rank. Raises TrainingError if the pod requests accelerators and torch finds too few, or cannot
    run on them.
    """
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not gpus and not may_take_found():
        return torch.device("cpu")
    found = found_accelerators()
    # Two ranks on one GPU would make NCCL fail.
    if len(found) >= local_ranks:
        device = found[local_rank]
        torch.accelerator.set_device_index(device)
        adapter_of(device).check()
        return device
    if gpus:
        raise TrainingError(
            f"this pod asked for {gpus} GPUs and has {local_ranks} ranks, but torch finds {len(found)} GPUs: look at"
            " the driver and the device plugin of the node, set processesPerWorker to the GPUs of a pod, or take an"
            " image whose torch is made for these GPUs; to train on the CPU, ask for no GPU in"
            " phases[].resources.limits"
        )
    return torch.device("cpu")
