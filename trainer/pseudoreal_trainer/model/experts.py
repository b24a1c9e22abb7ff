"""A mixture of experts in the place of a layer's feed-forward part.

Experts are split into prototypes, groups of consecutive experts. Each prototype routes every token to one of its
experts, and the outputs of all prototypes are summed (M6-T, arXiv 2105.15082). One prototype is Mixtral with one expert
for each token (arXiv 2401.04088). There is no auxiliary loss that balances experts: M6-T trained better without one.

An expert accepts no more than its capacity of the tokens of each sequence, the earliest (Switch, arXiv 2101.03961,
which counts over a whole batch). Counted in each sequence, it does not matter how a batch is cut into micro-batches
and ranks. It holds in evaluation, too: what is measured is what was trained, and no token depends on a later one.
Where tokens attend within documents, it counts in each document, which then computes what it does in a row of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any, ClassVar

import torch
from pseudoreal_api.spec.model import MixtureOfExperts, Model
from torch import Tensor, nn, zeros
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pseudoreal_trainer.model.attention import Documents
from pseudoreal_trainer.model.grouped import StackedFeedForward


class Router(nn.Linear):
    """The router: a row for each expert, those of a prototype beside each other."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__(hidden, experts, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, H] -> logits [B, T, experts], in float32 at least: in bfloat16 experts would tie (Switch, 2.4)."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return F.linear(hidden.to(wide), self.weight.to(wide))


@dataclass(frozen=True)
class Tally:
    """What a training pass learns of its experts. It comes out of the backward pass, as if it were the gradient of
    `sums`: so it travels with the pass, and a pass that is computed again counts once."""

    OTHERS: ClassVar = 3
    """Number of sums behind those of single experts: tokens refused, entropy, auxiliary loss."""

    sums: Tensor
    """Zeros, [experts + OTHERS], float64; the gradient is how often each expert was chosen, how many of these choices
    it refused as it was full, the entropy of the router's probabilities in nats, summed over choices, and the auxiliary
    loss, summed over tokens."""
    divisor: int
    """Tokens of the whole batch, by which its auxiliary losses are divided before the backward pass."""

    @classmethod
    def empty(cls, experts: int, divisor: int, device: torch.device) -> "Tally":
        return cls(zeros(experts + cls.OTHERS, dtype=torch.float64, device=device, requires_grad=True), divisor)

    def joined(self, weights: Tensor, counts: Tensor, refused: Tensor, entropy: Tensor, loss: Tensor) -> Tensor:
        """The weights of choices as they are. In their backward pass the auxiliary loss joins the batch's, and the
        tally gets its sums: counts [experts], and three scalars."""
        others = [each.detach().double() for each in (refused, entropy, loss)]
        learned = torch.cat([counts.double(), torch.stack(others)])
        out: Tensor = _Tallied.apply(weights, self.sums, loss, learned, self.divisor)
        return out


class _Tallied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, _: Tensor, loss: Tensor, learned: Tensor, divisor: int) -> Tensor:
        ctx.save_for_backward(learned)
        ctx.divisor, ctx.dtype = divisor, loss.dtype
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (sums,) = ctx.saved_tensors
        return gradient, sums, sums.new_full((), 1 / ctx.divisor, dtype=ctx.dtype), None, None


@torch.no_grad()
def entropy_of(chances: Tensor) -> Tensor:
    """The entropy of distributions, [..., experts], in nats, summed: a scalar. 0 where one expert has all, and the
    logarithm of their number where they are alike."""
    summed: Tensor = torch.special.entr(chances).sum(dtype=torch.float64)
    return summed


@dataclass(frozen=True)
class Choice:
    """Which experts a router chose for the N tokens of a micro-batch. It is made once: a choice that was made again in
    the backward pass might be another, where two experts are equal but for rounding."""

    chosen: Tensor
    """The numbers of each token's experts: of prototypes [B, T, P, 1], in each prototype; of top k [N, k]."""
    is_refused: Tensor | None
    """Whether the expert refuses the token as it is full, [B, T, P, 1]; None: experts are never full."""
    order: Tensor
    """The tokens of the first expert, then of the second, ...: of prototypes [P, N], in each those last that nobody
    accepts; of top k [N * k], numbers of choices."""
    counts: Tensor
    """Number of tokens that each expert accepts: of prototypes [P, n], of top k [experts]."""


@dataclass(frozen=True)
class Routes:
    """A choice, and by what the outputs of experts are multiplied."""

    choice: Choice
    weights: Tensor
    """With a gradient: of prototypes [P, N], of top k [N, k]."""


class Experts(StackedFeedForward):
    def __init__(self, spec: Model, experts: MixtureOfExperts) -> None:
        super().__init__(experts.count, spec.hidden_size, spec.feed_forward)
        self._prototypes = experts.prototypes
        self._capacity = capacity_of(spec)

    def forward(
        self, hidden: Tensor, logits: Tensor, tally: Tally | None = None, documents: Documents | None = None
    ) -> Tensor:
        """The sum of the prototypes' outputs: hidden [B, T, H], logits [B, T, experts] -> [B, T, H]. `documents`: those
        in which the capacity counts; None: whole sequences."""
        routes = self.routes(logits, tally, documents)
        accepted = routes.choice.counts.flatten()
        # The only place where the host waits for the device, once for all prototypes.
        counts: list[int] = accepted.tolist()
        made = self.outputs(self.rows(hidden.flatten(0, 1), routes.choice, counts), accepted, counts)
        weights = self.weights_of_rows(routes, counts)
        return self.combined(made, weights, routes.choice, counts).view_as(hidden)

    def routes(
        self,
        logits: Tensor,
        tally: Tally | None = None,
        documents: Documents | None = None,
        choice: Choice | None = None,
    ) -> Routes:
        """The routes for logits [B, T, experts]; `choice`: the one that was made before. Nothing is read back from the
        device: `bincount` and `one_hot` may, to learn a size."""
        grouped = logits.unflatten(-1, (self._prototypes, -1))  # [B, T, P, n]
        choice = choice or _chosen(grouped.detach(), self._capacity, documents)
        chances = grouped.softmax(dim=-1)
        gates = _gates(chances, choice.chosen)
        if tally is not None:
            assert choice.is_refused is not None, "these experts may be full"
            choices, no_loss = (
                _one_hot(choice.chosen, grouped.shape[-1]).sum(dim=(0, 1)).flatten(),
                logits.new_zeros(()),
            )
            gates = tally.joined(gates, choices, choice.is_refused.sum(), entropy_of(chances), no_loss)
        return Routes(choice, gates)

    # Rows are the accepted tokens in the order of all experts, which may be on other ranks.

    def rows(self, tokens: Tensor, choice: Choice, counts: Sequence[int]) -> Tensor:
        """A row for each token that an expert accepts: tokens [N, H], counts of all experts -> [rows, H]."""
        orders = self._orders(choice, counts)
        # One product at a time: each token is in it once, so no sum in the backward pass depends on a GPU's threads.
        return torch.cat([tokens.index_select(0, order) for order in orders])

    def weights_of_rows(self, routes: Routes, counts: Sequence[int]) -> Tensor:
        """[rows]"""
        orders = self._orders(routes.choice, counts)
        return torch.cat([w.index_select(0, order) for w, order in zip(routes.weights, orders, strict=True)])

    def combined(self, made: Tensor, weights: Tensor, choice: Choice, counts: Sequence[int]) -> Tensor:
        """What experts made of rows, added up for each token: made [rows, H], weights of rows [rows] -> [N, H]."""
        orders = self._orders(choice, counts)
        sizes = [len(order) for order in orders]
        out = made.new_zeros(choice.order.shape[1], made.shape[1])
        for order, part, gates in zip(orders, made.split(sizes), weights.split(sizes), strict=True):
            out = _added(out, order, part, gates)
        return out

    def _orders(self, choice: Choice, counts: Sequence[int]) -> list[Tensor]:
        """For each prototype the tokens that it accepts, in the order of its experts."""
        of_each = len(counts) // self._prototypes
        accepted = [sum(counts[first : first + of_each]) for first in range(0, len(counts), of_each)]
        return [order[:number] for order, number in zip(choice.order, accepted, strict=True)]


def _added(out: Tensor, order: Tensor, made: Tensor, gates: Tensor) -> Tensor:
    """The sum with what a prototype made of the tokens `order`. Each token is in that once, so the sum is the same in
    every run, on a GPU too."""
    return out.index_add(0, order, made * gates.to(made.dtype)[:, None])


def _chosen(logits: Tensor, capacity: int, documents: Documents | None) -> Choice:
    """The choice for logits [B, T, P, n]."""
    experts = logits.shape[-1]
    choice = logits.argmax(dim=-1, keepdim=True)  # [B, T, P, 1]
    chosen = _one_hot(choice, experts)
    is_refused = _numbers(chosen, choice, documents) > capacity  # [B, T, P, 1]
    counts = (chosen & ~is_refused).sum(dim=(0, 1))  # [P, n]
    expert = choice.masked_fill(is_refused, experts).flatten(0, 1).squeeze(-1).t()  # [P, N]
    return Choice(choice, is_refused, expert.argsort(dim=-1, stable=True), counts)


def _one_hot(choice: Tensor, experts: int) -> Tensor:
    """[B, T, P, 1] -> [B, T, P, n]"""
    return choice == torch.arange(experts, device=choice.device)


def _numbers(chosen: Tensor, choice: Tensor, documents: Documents | None) -> Tensor:
    """The number of each token, from 1, among those of its sequence, or document, that choose the same expert: chosen
    [B, T, P, n], choice [B, T, P, 1] -> [B, T, P, 1]."""
    counts = chosen.cumsum(dim=1)
    numbers = counts.gather(-1, choice)
    if documents is None:
        return numbers
    sequences, places, prototypes = (torch.arange(size, device=chosen.device) for size in chosen.shape[:3])
    begins = (places - documents.positions)[..., None]  # [B, T, 1]
    # Those that were counted at the end of the document before; before the first one nothing was, and -1 is the end.
    before = counts[sequences[:, None, None], begins - 1, prototypes, choice.squeeze(-1)]  # [B, T, P]
    return numbers - before.masked_fill(begins == 0, 0)[..., None]


def _gates(chances: Tensor, choice: Tensor) -> Tensor:
    """The gates: 1, with the gradient of the chosen expert's probability. chances [B, T, P, n], choice [B, T, P, 1] ->
    [P, N].

    Mixtral divides by the sum of the chosen experts' probabilities, which leaves 1 for one expert and nothing for the
    router to learn from. So the gradient passes straight through, as if by the probability (Bengio et al. 2013, arXiv
    1308.3432). Times the probability itself, as in Switch, the layer would not be Mixtral's.
    """
    chance = chances.gather(-1, choice).flatten(0, 1).squeeze(-1).t()
    # The difference first: it is 0 to the bit, where 1 + p - p need not be 1.
    return 1 + (chance - chance.detach())


def capacity_of(spec: Model) -> int:
    """Number of tokens of a sequence that an expert accepts: `capacityFactor` times its even share, rounded up. It is
    that of a training sequence also where a shorter one is read: the beginning of a text is computed as it is in the
    whole."""
    assert spec.experts is not None, "only experts have one"
    share = Fraction(spec.sequence_length * spec.experts.prototypes, spec.experts.count)
    return ceil(Fraction(spec.experts.capacity_factor) * share)
