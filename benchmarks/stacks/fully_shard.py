"""torch's fully_shard: each block is a group, and the rest is a group."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from pseudoreal_trainer.model.reference import Transformer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from benchmarks.stacks import plain
from benchmarks.work import Work


def on_device(work: Work, rank: int, world: int) -> Iterator[Tensor]:
    return _train(work, rank, world, OffloadPolicy())


def weights_kept(work: Work, rank: int, world: int) -> Iterator[Tensor]:
    """Gather weights once per micro-batch, and not again for the backward pass."""
    return _train(work, rank, world, OffloadPolicy(), reshard=False)


def offloaded(work: Work, rank: int, world: int) -> Iterator[Tensor]:
    # Pinned memory raises on a machine without an accelerator.
    return _train(work, rank, world, CPUOffloadPolicy(pin_memory=work.batches.is_cuda))


def _train(
    work: Work, rank: int, world: int, policy: OffloadPolicy, *, reshard: bool | None = None
) -> Iterator[Tensor]:
    """Train. `reshard` None is torch's default: reshard after the forward pass of every group except the root."""
    model = plain.plain_model(work)
    root = _shard(model, init_device_mesh(work.batches.device.type, (world,)), policy, reshard)

    def synced(is_last: bool) -> AbstractContextManager[None]:
        root.set_requires_gradient_sync(is_last)
        return nullcontext()

    return plain.train(model, work, rank, world, synced)


def _shard(model: Transformer, mesh: DeviceMesh, policy: OffloadPolicy, reshard: bool | None) -> FSDPModule:
    """Shard the model in place and return it."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, offload_policy=policy, reshard_after_forward=reshard)
