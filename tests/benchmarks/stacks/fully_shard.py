"""torch's fully_shard: each block and the rest are a group of their own."""

from collections.abc import Iterator

import torch
from pseudoreal_trainer.model.transformer import Transformer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from tests.benchmarks.stacks.plain import plain_model
from tests.benchmarks.work import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY, Work, cross_entropy


def on_device(work: Work, rank: int, world: int) -> Iterator[Tensor]:
    return _train(work, rank, world, OffloadPolicy())


def weights_kept(work: Work, rank: int, world: int) -> Iterator[Tensor]:
    """They are gathered once in each micro-batch, not again for its backward pass."""
    return _train(work, rank, world, OffloadPolicy(), reshard=False)


def offloaded(work: Work, rank: int, world: int) -> Iterator[Tensor]:
    # Pinned memory raises on a machine without an accelerator.
    return _train(work, rank, world, CPUOffloadPolicy(pin_memory=work.batches.is_cuda))


def _train(
    work: Work, rank: int, world: int, policy: OffloadPolicy, *, reshard: bool | None = None
) -> Iterator[Tensor]:
    """`reshard`: None is torch's default, after the forward pass of every group but the root."""
    model = plain_model(work)
    root = _shard(model, init_device_mesh(work.batches.device.type, (world,)), policy, reshard)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )
    for batch in work.batches:
        total = torch.zeros((), device=batch.device)
        for number, tokens in enumerate(work.micro_batches_of(batch, rank, world), start=1):
            # The gradients of all micro-batches are reduced once, with the last.
            root.set_requires_gradient_sync(number == work.micro_batches)
            loss = cross_entropy(model(tokens[:, :-1]), tokens) / work.micro_batches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        yield total


def _shard(model: Transformer, mesh: DeviceMesh, policy: OffloadPolicy, reshard: bool | None) -> FSDPModule:
    """Shards the model in place."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, offload_policy=policy, reshard_after_forward=reshard)
