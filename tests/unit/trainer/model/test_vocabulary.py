"""Embedding and loss over slices of the vocabulary, against torch's own functions over the whole vocabulary."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import TypeVar

import pytest
import torch
from pseudoreal_trainer.model.loss import IGNORED
from pseudoreal_trainer.model.vocabulary import embed, log_sum_exp_and_target
from torch import Tensor
from torch.nn import functional as F

T = TypeVar("T")
ROWS, HIDDEN = 12, 5
WIDE = torch.float64


@dataclass
class Meeting:
    """Threads that stand for tensor ranks."""

    count: int
    barrier: Barrier = field(init=False)
    brought: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.count)

    def exchange(self, rank: int, own: Tensor) -> Tensor:
        """Return the tensors of all ranks: [...] -> [K, ...]."""
        self.brought[rank] = own
        self.barrier.wait()
        found = torch.stack([self.brought[number] for number in range(self.count)])
        self.barrier.wait()
        return found


@dataclass
class Ranks:
    """A thread's exchanges with the others; each rank has consecutive tokens."""

    meeting: Meeting
    rank: int

    @property
    def count(self) -> int:
        return self.meeting.count

    def of_all(self, own: Tensor) -> Tensor:
        return self.meeting.exchange(self.rank, own)

    def gather_values(self, own: Tensor) -> Tensor:
        return torch.cat([*self.of_all(own)], dim=1)

    def sum_to_own(self, summands: Tensor) -> Tensor:
        return self.of_all(summands).sum(dim=0).chunk(self.count, dim=1)[self.rank]

    def gather(self, own: Tensor) -> Tensor:
        raise NotImplementedError("neither embedding nor loss gathers with gradient")


def on_ranks(count: int, act: Callable[[Ranks], T]) -> list[T]:
    meeting = Meeting(count)
    with ThreadPoolExecutor(count) as threads:
        return [*threads.map(lambda rank: act(Ranks(meeting, rank)), range(count))]


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_loss_over_slices_is_the_loss_over_the_vocabulary(ranks: int, scale: float) -> None:
    random = torch.Generator().manual_seed(ranks)
    logits = scale * torch.randn(7, ROWS, dtype=WIDE, generator=random)
    targets = torch.randint(ROWS, (7,), generator=random)
    targets[[0, 5]] = IGNORED
    factor = torch.randn(7, dtype=WIDE, generator=random)
    is_counted = targets != IGNORED

    def loss(log_sums: Tensor, of_targets: Tensor) -> Tensor:
        return ((log_sums - of_targets) * is_counted + factor * log_sums.square()).sum()

    def over_slices(tensor: Ranks) -> tuple[Tensor, Tensor, Tensor]:
        own = logits.chunk(ranks, dim=1)[tensor.rank].clone().requires_grad_()
        log_sums, of_targets = log_sum_exp_and_target(own, targets, tensor)
        (gradient,) = torch.autograd.grad(loss(log_sums, of_targets), own)
        return log_sums.detach(), of_targets.detach(), gradient

    whole = logits.clone().requires_grad_()
    expected, of_target = whole.logsumexp(dim=1), whole.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    (gradient,) = torch.autograd.grad(loss(expected, of_target * is_counted), whole)
    found = on_ranks(ranks, over_slices)
    for log_sums, of_targets, _ in found:
        same(log_sums, expected.detach())
        assert torch.equal(of_targets, of_target.detach() * is_counted)
        assert torch.equal(log_sums, found[0][0]), "all ranks have the same bits"
    same(torch.cat([own for _, _, own in found], dim=1) / scale, gradient / scale)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_embeddings_of_own_tokens_and_gradients_of_own_rows(ranks: int) -> None:
    random = torch.Generator().manual_seed(ranks)
    matrix = torch.randn(ROWS, HIDDEN, generator=random)
    tokens = torch.randint(ROWS, (3, 2 * ranks), generator=random)
    gradient = torch.randn(3, 2 * ranks, HIDDEN, generator=random)

    def over_slices(tensor: Ranks) -> tuple[Tensor, Tensor]:
        own = matrix.chunk(ranks)[tensor.rank].clone().requires_grad_()
        with torch.no_grad():
            found = embed(own, tokens, tensor)
        unread = embed(own, tokens, tensor)
        assert unread.shape == found.shape
        (of_rows,) = torch.autograd.grad(unread, own, gradient.chunk(ranks, dim=1)[tensor.rank])
        return found, of_rows

    whole = matrix.clone().requires_grad_()
    expected = F.embedding(tokens, whole)
    (of_matrix,) = torch.autograd.grad(expected, whole, gradient)
    found = on_ranks(ranks, over_slices)
    assert torch.equal(torch.cat([own for own, _ in found], dim=1), expected.detach())
    assert torch.equal(torch.cat([rows for _, rows in found]), of_matrix)
