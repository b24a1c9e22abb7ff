"""Mixture of experts in the place of a layer's MLP.

Experts are split into prototypes, groups of consecutive experts. Each prototype routes every token to one of its
experts, and the outputs of all prototypes are summed (M6-T, arXiv 2105.15082). With one prototype, the layer equals a
Mixtral layer with one expert per token (arXiv 2401.04088). Prototypes have no auxiliary loss for balance: M6-T trained
better without one. (`RouterStatistics` and `StepLoss` also serve top-k experts.)

An expert accepts the earliest tokens of each sequence, up to its capacity (Switch, arXiv 2101.03961, counts over a
whole batch). Tokens are counted per sequence, so it does not matter how a batch is cut into micro-batches and ranks.
The capacity also applies in evaluation: evaluation measures the model as trained, and no token depends on later tokens.
If attention stays within documents, the capacity applies per document. A document then gives the same outputs as in a
row of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pseudoreal_api.spec.model import MixtureOfExperts, Model
from torch import Tensor, nn, zeros
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pseudoreal_trainer.model.attention import Documents
from pseudoreal_trainer.model.grouped import StackedFeedForward


class Router(nn.Linear):
    """Router of a layer: a linear layer with one row per expert. Experts of a prototype have adjacent rows."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__(hidden, experts, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits in at least float32: [B, T, H] -> [B, T, experts]. In bfloat16, experts would tie (Switch,
        2.4)."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return F.linear(hidden.to(wide), self.weight.to(wide))


@dataclass(frozen=True)
class RouterStatistics:
    """Router statistics of a training pass. The backward pass returns the statistics as the gradient of `sums`, so a
    recomputed pass counts once."""

    OTHERS: ClassVar = 3
    """Number of sums after the sums of single experts: refused choices, entropy, auxiliary loss."""

    sums: Tensor
    """Zeros, [experts + OTHERS], float64. The gradient holds, in this order: how often each expert was chosen; how many
    of these choices were refused by full experts; the entropy of the router's probabilities in nats, summed over
    choices; the auxiliary loss, summed over tokens."""
    divisor: int
    """Number of tokens in the whole batch; the backward pass divides auxiliary losses by it."""
    choices_of_step: Callable[[], Tensor]
    """Returns how often all tokens of the batch choose each expert of the layer, [experts]. Called in backward passes
    only: the counts are known once all forward passes through the layer are done."""

    @classmethod
    def empty(
        cls, experts: int, divisor: int, device: torch.device, choices_of_step: Callable[[], Tensor] | None = None
    ) -> "RouterStatistics":
        """Return statistics of zeros. If `choices_of_step` is None, all experts count as chosen equally often."""
        sums = zeros(experts + cls.OTHERS, dtype=torch.float64, device=device, requires_grad=True)
        return cls(sums, divisor, choices_of_step or (lambda: torch.ones(experts, device=device)))

    def attach(
        self,
        weights: Tensor,
        counts: Tensor,
        refused: Tensor,
        entropy: Tensor,
        loss: Tensor,
        of_step: "StepLoss | None" = None,
    ) -> Tensor:
        """Return the weights of the chosen experts unchanged. Their backward pass adds the gradients of the auxiliary
        losses, and returns the statistics as the gradient of `sums`. counts: [experts]; refused, entropy and loss:
        scalars. `of_step`: this pass's part of an auxiliary loss over the step; None without such a loss."""
        others = [each.detach().double() for each in (refused, entropy, loss)]
        learned = torch.cat([counts.double(), torch.stack(others)])
        probabilities, factor = (None, 0.0) if of_step is None else (of_step.probabilities, of_step.factor)
        out: Tensor = _WithStatistics.apply(weights, self.sums, loss, probabilities, learned, factor, self)
        return out


@dataclass(frozen=True)
class StepLoss:
    """One pass's part of an auxiliary loss over all choices of the step, which are known only after all forward passes.
    The loss is factor * number of experts * sum over experts of (share of all choices * router probability)."""

    probabilities: Tensor
    """Router probabilities, with gradient, summed over the pass's tokens: [experts]."""
    factor: float

    def derivative(self, choices: Tensor) -> Tensor:
        """Return the derivative of the loss by `probabilities`, [experts], float64. `choices`: how often the whole step
        chose each expert, [experts]."""
        return self.factor * len(choices) * choices.double() / choices.sum()


class _WithStatistics(torch.autograd.Function):
    """Identity on `weights`. The backward pass adds the gradients of the auxiliary losses, and returns the statistics
    as the gradient of `RouterStatistics.sums`."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        _: Tensor,
        loss: Tensor,
        probabilities: Tensor | None,
        learned: Tensor,
        factor: float,
        statistics: RouterStatistics,
    ) -> Tensor:
        ctx.save_for_backward(learned, probabilities)
        ctx.factor, ctx.statistics, ctx.dtype = factor, statistics, loss.dtype
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (sums, probabilities), statistics = ctx.saved_tensors, ctx.statistics
        of_loss, of_probabilities = sums.new_full((), 1 / statistics.divisor, dtype=ctx.dtype), None
        if probabilities is not None:
            derivative = StepLoss(probabilities, ctx.factor).derivative(statistics.choices_of_step())
            sums = torch.cat([sums[:-1], sums[-1:] + (derivative * probabilities).sum()])
            of_probabilities = (derivative / statistics.divisor).to(probabilities.dtype)
        return gradient, sums, of_loss, of_probabilities, None, None, None


@torch.no_grad()
def total_entropy(probabilities: Tensor) -> Tensor:
    """Return the sum of the entropies of distributions, in nats: [..., experts] -> a float64 scalar. An entropy is 0 if
    one expert has the probability 1, and log(experts) if all are equally likely."""
    summed: Tensor = torch.special.entr(probabilities).sum(dtype=torch.float64)
    return summed


@dataclass(frozen=True)
class RoutingDecision:
    """Routing decision for the N tokens of a micro-batch. Recomputation reuses the decision: computed again, it could
    differ where the scores of two experts differ only by rounding."""

    chosen: Tensor
    """Indices of each token's experts: for prototypes [B, T, P, 1], the index within each prototype; for top k [N, k],
    the index within the layer."""
    is_refused: Tensor | None
    """Whether the chosen expert is full and refuses the token, [B, T, P, 1]; None: experts are never full."""
    order: Tensor
    """Indices, sorted by expert. For prototypes: indices of tokens, refused tokens last, [P, N]. For top k: indices of
    choices, where choice j of token n is n * k + j, [N * k]."""
    counts: Tensor
    """Number of tokens that each expert accepts: for prototypes [P, n], for top k [experts]."""
    unbiased_counts: Tensor | None = None
    """How often each expert would be chosen without a balancing bias, [experts]; None: no loss needs these counts."""


@dataclass
class SavedDecision:
    """Routing decision of a pass, kept for the recomputed pass."""

    decision: RoutingDecision | None = None
    """Routing decision; None until the first pass has made the decision."""


@dataclass(frozen=True)
class Routes:
    """Routing decision, and the weights of the experts' outputs."""

    decision: RoutingDecision
    weights: Tensor
    """Weights of the experts' outputs, with gradient: for prototypes [P, N], for top k [N, k]."""


class Experts(StackedFeedForward):
    """Experts in prototypes, with a capacity per expert."""

    def __init__(self, spec: Model, experts: MixtureOfExperts) -> None:
        super().__init__(experts.count, spec.hidden_size, spec.feed_forward)
        self._prototypes = experts.prototypes
        self._capacity = spec.expert_capacity

    def forward(
        self,
        hidden: Tensor,
        logits: Tensor,
        statistics: RouterStatistics | None = None,
        documents: Documents | None = None,
        saved: SavedDecision | None = None,
    ) -> Tensor:
        """Return the sum of the prototypes' outputs: hidden [B, T, H], logits [B, T, experts] -> [B, T, H].

        `documents`: the capacity applies per document; None: per sequence. `saved`: holds the routing decision of an
        earlier pass, or receives the decision of this pass.
        """
        saved = saved or SavedDecision()
        routes = self.routes(logits, statistics, documents, saved.decision)
        saved.decision = routes.decision
        accepted = routes.decision.counts.flatten()
        # The only place where the host waits for the device, once for all prototypes.
        counts: list[int] = accepted.tolist()
        made = self.outputs(self.rows(hidden.flatten(0, 1), routes.decision, counts), accepted, counts)
        weights = self.row_weights(routes, counts)
        return self.combine(made, weights, routes.decision, counts).view_as(hidden)

    def routes(
        self,
        logits: Tensor,
        statistics: RouterStatistics | None = None,
        documents: Documents | None = None,
        decision: RoutingDecision | None = None,
    ) -> Routes:
        """Return the routes for logits [B, T, experts]. `decision`: routing decision of an earlier pass."""
        # The host must not wait for the device here, so neither `bincount` nor `one_hot` is used: both may wait to read
        # a size.
        grouped = logits.unflatten(-1, (self._prototypes, -1))  # [B, T, P, n]
        decision = decision or _decide(grouped.detach(), self._capacity, documents)
        probabilities = grouped.softmax(dim=-1)
        gates = _gates(probabilities, decision.chosen)
        if statistics is not None:
            assert decision.is_refused is not None, "experts of prototypes may be full"
            choices = _one_hot(decision.chosen, grouped.shape[-1]).sum(dim=(0, 1)).flatten()
            refused, no_loss = decision.is_refused.sum(), logits.new_zeros(())
            gates = statistics.attach(gates, choices, refused, total_entropy(probabilities), no_loss)
        return Routes(decision, gates)

    # Rows: the accepted tokens, sorted by expert. The experts may be on other ranks.

    def rows(self, tokens: Tensor, decision: RoutingDecision, counts: Sequence[int]) -> Tensor:
        """Return a row for each token that an expert accepts: tokens [N, H], counts of all experts -> [rows, H]."""
        orders = self._orders(decision, counts)
        # One prototype at a time: an order contains each token at most once, so no sum in the backward pass depends on
        # the order in which GPU threads run.
        return torch.cat([tokens.index_select(0, order) for order in orders])

    def row_weights(self, routes: Routes, counts: Sequence[int]) -> Tensor:
        """Return the weights of the rows, [rows]."""
        orders = self._orders(routes.decision, counts)
        return torch.cat([w.index_select(0, order) for w, order in zip(routes.weights, orders, strict=True)])

    def combine(self, made: Tensor, weights: Tensor, decision: RoutingDecision, counts: Sequence[int]) -> Tensor:
        """Return the experts' outputs added up for each token: made [rows, H], weights of rows [rows] -> [N, H]."""
        orders = self._orders(decision, counts)
        sizes = [len(order) for order in orders]
        out = made.new_zeros(decision.order.shape[1], made.shape[1])
        for order, part, gates in zip(orders, made.split(sizes), weights.split(sizes), strict=True):
            # One prototype at a time: each token is in `order` at most once, so the sum is the same in every run, on a
            # GPU too.
            out = out.index_add(0, order, part * gates.to(part.dtype)[:, None])
        return out

    def _orders(self, decision: RoutingDecision, counts: Sequence[int]) -> list[Tensor]:
        """Return, for each prototype, the indices of the accepted tokens, sorted by expert."""
        of_each = len(counts) // self._prototypes
        accepted = [sum(counts[first : first + of_each]) for first in range(0, len(counts), of_each)]
        return [order[:number] for order, number in zip(decision.order, accepted, strict=True)]


def _decide(logits: Tensor, capacity: int, documents: Documents | None) -> RoutingDecision:
    """Return the routing decision for logits [B, T, P, n]."""
    experts = logits.shape[-1]
    chosen = logits.argmax(dim=-1, keepdim=True)  # [B, T, P, 1]
    is_chosen = _one_hot(chosen, experts)
    is_refused = _queue_positions(is_chosen, chosen, documents) > capacity  # [B, T, P, 1]
    counts = (is_chosen & ~is_refused).sum(dim=(0, 1))  # [P, n]
    expert = chosen.masked_fill(is_refused, experts).flatten(0, 1).squeeze(-1).t()  # [P, N]
    return RoutingDecision(chosen, is_refused, expert.argsort(dim=-1, stable=True), counts)


def _one_hot(chosen: Tensor, experts: int) -> Tensor:
    """Return the chosen experts as one-hot: [B, T, P, 1] -> [B, T, P, n]."""
    return chosen == torch.arange(experts, device=chosen.device)


def _queue_positions(is_chosen: Tensor, chosen: Tensor, documents: Documents | None) -> Tensor:
    """Return the position of each token, from 1, among the tokens of its sequence, or document, that choose the same
    expert: is_chosen [B, T, P, n], chosen [B, T, P, 1] -> [B, T, P, 1]."""
    counts = is_chosen.cumsum(dim=1)
    positions = counts.gather(-1, chosen)
    if documents is None:
        return positions
    sequences, tokens, prototypes = (torch.arange(size, device=is_chosen.device) for size in is_chosen.shape[:3])
    starts = (tokens - documents.positions)[..., None]  # [B, T, 1]
    # Counts at the end of the previous document. The first document has no previous document: the index is then -1, the
    # last token, and the count is masked.
    before = counts[sequences[:, None, None], starts - 1, prototypes, chosen.squeeze(-1)]  # [B, T, P]
    return positions - before.masked_fill(starts == 0, 0)[..., None]


def _gates(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """Return the gates: 1, with the gradient of the chosen expert's probability. probabilities [B, T, P, n], chosen [B,
    T, P, 1] -> [P, N].

    Mixtral divides by the sum of the chosen experts' probabilities. For one expert, the quotient is always 1, and the
    router would get no gradient. So the gradient passes straight through, as if the gate were the probability (Bengio
    et al. 2013, arXiv 1308.3432). With the probability itself as the gate, as in Switch, the layer's output would
    differ from Mixtral's.
    """
    probability = probabilities.gather(-1, chosen).flatten(0, 1).squeeze(-1).t()
    # The difference first: it is exactly 0, while 1 + p - p need not be 1.
    return 1 + (probability - probability.detach())
