"""torch's DistributedDataParallel: unsharded weights, gradients and optimizer state on every rank."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.stacks import plain
from benchmarks.work import Work


def train(work: Work, rank: int, world: int) -> Iterator[Tensor]:
    model = DistributedDataParallel(plain.plain_model(work), gradient_as_bucket_view=True)

    def synced(is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else model.no_sync()

    return plain.train(model, work, rank, world, synced)
