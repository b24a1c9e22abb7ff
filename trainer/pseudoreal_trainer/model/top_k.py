"""Top-k experts: each token goes to the experts that the router scores highest, as in Mixtral (arXiv 2401.04088) and
DeepSeek (arXiv 2412.19437). Experts have no capacity limit, so the result for a token does not depend on other tokens.

Two mechanisms keep experts in balance. A bias is added to the scores for the choice of experts only; between steps, the
bias grows for experts with fewer tokens than the mean, and shrinks for experts with more. An auxiliary loss, computed
per sequence or over the whole step, adds a gradient. A z-loss keeps the router's outputs small.
"""

from collections.abc import Sequence
from typing import Any

import torch
from pseudoreal_api.spec.model import Model, TopK
from torch import Tensor, nn, ones_like, zeros
from torch.autograd.function import once_differentiable

from pseudoreal_trainer.model.attention import Documents
from pseudoreal_trainer.model.experts import (
    RouterStatistics,
    Routes,
    RoutingDecision,
    SavedDecision,
    StepLoss,
    total_entropy,
)
from pseudoreal_trainer.model.grouped import StackedFeedForward


class TopKExperts(StackedFeedForward):
    """Experts of a layer, with top-k routing."""

    def __init__(self, spec: Model, top_k: TopK, count: int) -> None:
        super().__init__(count, spec.hidden_size, spec.expert)
        self._spec, self._count = top_k, count
        self._factor, self._z_factor = float(top_k.auxiliary_loss), float(top_k.router_z_loss)
        has_bias = top_k.bias_update_rate is not None
        self.balancing_bias = nn.Parameter(zeros(count), requires_grad=False) if has_bias else None

    def forward(
        self,
        hidden: Tensor,
        logits: Tensor,
        statistics: RouterStatistics | None = None,
        *,
        saved: SavedDecision | None = None,
    ) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts: hidden [B, T, H], logits [B, T, experts] ->
        [B, T, H]. `saved`: holds the routing decision of an earlier pass, or receives the decision of this pass."""
        saved = saved or SavedDecision()
        routes = self.routes(logits, statistics, decision=saved.decision)
        saved.decision = routes.decision
        decision = routes.decision
        # The only place where the host waits for the device.
        counts: list[int] = decision.counts.tolist()
        made = self.outputs(self.rows(hidden.flatten(0, 1), decision, counts), decision.counts, counts)
        placed = made.index_select(0, _inverse(decision.order)).unflatten(0, routes.weights.shape)  # [N, k, H]
        out: Tensor = (placed * routes.weights.to(made.dtype)[..., None]).sum(dim=1)
        return out.view_as(hidden)

    def routes(
        self,
        logits: Tensor,
        statistics: RouterStatistics | None = None,
        documents: Documents | None = None,  # noqa: ARG002
        decision: RoutingDecision | None = None,
    ) -> Routes:
        """Return the routes for logits [B, T, experts]. `decision`: routing decision of an earlier pass. These experts
        are never full, so documents are not needed."""
        scores = self._scores(logits)  # [B, T, experts]
        of_tokens = scores.flatten(0, 1)
        decision = decision or self._decide(of_tokens.detach())
        weights = self._weights(of_tokens, decision.chosen)
        if statistics is not None:
            per_token, refused = weights.shape[1], decision.counts.new_zeros(())
            entropy = per_token * total_entropy(_probabilities(scores.detach(), self._spec))
            losses = self._sequence_loss(scores) + self._z_loss(logits)
            weights = statistics.attach(weights, decision.counts, refused, entropy, losses, self._step_loss(scores))
        return Routes(decision, weights)

    # Rows: the choices, sorted by expert. The experts may be on other ranks.

    def rows(self, tokens: Tensor, decision: RoutingDecision, counts: Sequence[int]) -> Tensor:  # noqa: ARG002
        """Return a row for each choice of each token: tokens [N, H] -> [N * k, H]."""
        rows: Tensor = _SelectChoices.apply(tokens, decision.order, decision.chosen.shape[1])
        return rows

    def row_weights(self, routes: Routes, counts: Sequence[int]) -> Tensor:  # noqa: ARG002
        """Return the weights of the rows, [N * k]."""
        return routes.weights.flatten().index_select(0, routes.decision.order)

    def combine(self, made: Tensor, weights: Tensor, decision: RoutingDecision, counts: Sequence[int]) -> Tensor:  # noqa: ARG002
        """Return the experts' outputs added up for each token: made [N * k, H], weights of rows [N * k] -> [N, H]."""
        weighted = made * weights.to(made.dtype)[:, None]
        of_tokens: Tensor = weighted.index_select(0, _inverse(decision.order)).unflatten(0, decision.chosen.shape)
        return of_tokens.sum(dim=1)

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=-1) if self._spec.score == "Softmax" else logits.sigmoid()

    def _decide(self, scores: Tensor) -> RoutingDecision:
        """Return the routing decision for scores [N, experts]."""
        biased = scores if self.balancing_bias is None else scores + self.balancing_bias
        chosen = biased.topk(self._spec.per_token, dim=-1).indices
        # Choices of the first expert, then of the second, ...
        order = chosen.flatten().argsort(stable=True)
        counts = _counts(chosen.flatten(), self._count)
        return RoutingDecision(chosen, None, order, counts, self._unbiased_counts(scores, counts))

    def _unbiased_counts(self, scores: Tensor, counts: Tensor) -> Tensor | None:
        """Return how often each expert is among the top k of scores [N, experts]; None if no loss needs the counts.
        `counts`: the counts with the balancing bias."""
        if self._spec.balance_over != "Step":
            return None
        if self.balancing_bias is None:
            return counts
        return _counts(scores.topk(self._spec.per_token, dim=-1).indices.flatten(), self._count)

    def _weights(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the weights of chosen experts, [N, k]; scores [N, experts]."""
        weights = scores.gather(-1, chosen)
        if self._spec.weights == "Renormalised":
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * float(self._spec.scale)

    def _step_loss(self, scores: Tensor) -> StepLoss | None:
        """Return these tokens' part of the auxiliary loss over the whole step (global-batch balance: Qiu et al., arXiv
        2501.11873); None without such a loss. scores [B, T, experts]."""
        if self._spec.balance_over != "Step":
            return None
        return StepLoss(_probabilities(scores, self._spec).sum(dim=(0, 1)), self._factor)

    def _sequence_loss(self, scores: Tensor) -> Tensor:
        """Return the auxiliary loss of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20) times its factor, summed over
        the tokens of all sequences: scores [B, T, experts] -> a scalar.

        As in DeepSeek-V3, choices are counted without the balancing bias. The loss is computed per sequence, so
        micro-batches and ranks do not matter.
        """
        if not self._factor or self._spec.balance_over != "Sequence":
            return scores.new_zeros(())
        probabilities = _probabilities(scores, self._spec)
        chosen = scores.detach().topk(self._spec.per_token, dim=-1).indices.flatten(1)  # [B, T * k]
        shares = _counts(chosen, self._count).to(scores.dtype) / chosen.shape[1]  # [B, experts]
        return self._factor * self._count * (shares * probabilities.sum(dim=1)).sum()

    def _z_loss(self, logits: Tensor) -> Tensor:
        """Return the z-loss of ST-MoE (arXiv 2202.08906, equation 5) times its factor, summed over tokens: logits [B,
        T, experts] -> a scalar."""
        if not self._z_factor:
            return logits.new_zeros(())
        return self._z_factor * logits.logsumexp(dim=-1).square().sum()


class _SelectChoices(torch.autograd.Function):
    """Rows of choices in `order`: tokens [N, H] -> [N * k, H], where choice j of token n is n * k + j.

    The backward pass is written by hand. Autograd's would add up the gradients of a token's rows in the order in which
    the threads of a GPU reach them; this one adds them in the order of the token's choices.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.per_token = per_token
        return tokens.index_select(0, order.div(per_token, rounding_mode="floor"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        of_choices = gradient.index_select(0, _inverse(order)).unflatten(0, (-1, ctx.per_token))  # [N, k, H]
        return of_choices.sum(dim=1), None, None


def _inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation, [n]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _probabilities(scores: Tensor, spec: TopK) -> Tensor:
    """Return the scores of each token as shares of their sum, [..., experts]."""
    return scores if spec.score == "Softmax" else scores / scores.sum(dim=-1, keepdim=True)


def _counts(choices: Tensor, experts: int) -> Tensor:
    """Return how often each expert is chosen: choices [..., n] -> [..., experts]. Nothing is read back from the device;
    `bincount` would read back."""
    none = zeros((*choices.shape[:-1], experts), dtype=choices.dtype, device=choices.device)
    return none.scatter_add(-1, choices, ones_like(choices))
