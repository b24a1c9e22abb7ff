"""Experts of which each token goes to the few that the router scores highest, as in Mixtral (arXiv 2401.04088) and
DeepSeek (arXiv 2412.19437). None is ever full, so no token depends on another.

Two things keep experts in balance. A bias is added to the scores where experts are chosen, and nowhere else; between
steps it changes by the number of tokens that each expert got. An auxiliary loss of each sequence has a gradient. A
z-loss keeps the router's outputs small.
"""

from collections.abc import Sequence

from pseudoreal_api.spec.model import Model, TopK
from torch import Tensor, nn, ones_like, zeros

from pseudoreal_trainer.model.attention import Documents
from pseudoreal_trainer.model.experts import Choice, Routes, Tally, entropy_of
from pseudoreal_trainer.model.grouped import StackedFeedForward


class TopKExperts(StackedFeedForward):
    def __init__(self, spec: Model, top_k: TopK, count: int) -> None:
        super().__init__(count, spec.hidden_size, spec.expert)
        self._spec, self._count = top_k, count
        self._factor, self._z_factor = float(top_k.auxiliary_loss), float(top_k.router_z_loss)
        has_bias = top_k.bias_update_rate is not None
        self.balancing_bias = nn.Parameter(zeros(count), requires_grad=False) if has_bias else None

    def forward(self, hidden: Tensor, logits: Tensor, tally: Tally | None = None) -> Tensor:
        """The weighted sum of the outputs of each token's experts: hidden [B, T, H], logits [B, T, experts] -> [B, T,
        H]."""
        routes = self.routes(logits, tally)
        choice = routes.choice
        # The only place where the host waits for the device.
        counts: list[int] = choice.counts.tolist()
        made = self.outputs(self.rows(hidden.flatten(0, 1), choice, counts), choice.counts, counts)
        placed = made.index_select(0, choice.order.argsort()).unflatten(0, routes.weights.shape)  # [N, k, H]
        out: Tensor = (placed * routes.weights.to(made.dtype)[..., None]).sum(dim=1)
        return out.view_as(hidden)

    def routes(
        self,
        logits: Tensor,
        tally: Tally | None = None,
        documents: Documents | None = None,  # noqa: ARG002
        choice: Choice | None = None,
    ) -> Routes:
        """The routes for logits [B, T, experts]; `choice`: the one that was made before. These experts are never full,
        so they need not know documents."""
        scores = self._scores(logits)  # [B, T, experts]
        of_tokens = scores.flatten(0, 1)
        choice = choice or self._choice(of_tokens.detach())
        weights = self._weights(of_tokens, choice.chosen)
        if tally is not None:
            choices, none = weights.shape[1], choice.counts.new_zeros(())
            entropy = choices * entropy_of(_chances(scores.detach(), self._spec))
            losses = self._auxiliary_loss(scores) + self._z_loss(logits)
            weights = tally.joined(weights, choice.counts, none, entropy, losses)
        return Routes(choice, weights)

    # Rows are the choices in the order of all experts, which may be on other ranks.

    def rows(self, tokens: Tensor, choice: Choice, counts: Sequence[int]) -> Tensor:  # noqa: ARG002
        """A row for each choice of each token: tokens [N, H] -> [N * k, H]."""
        return _copies(tokens, choice.chosen.shape[1]).index_select(0, choice.order)

    def weights_of_rows(self, routes: Routes, counts: Sequence[int]) -> Tensor:  # noqa: ARG002
        """[N * k]"""
        return routes.weights.flatten().index_select(0, routes.choice.order)

    def combined(self, made: Tensor, weights: Tensor, choice: Choice, counts: Sequence[int]) -> Tensor:  # noqa: ARG002
        """What experts made of rows, added up for each token: made [N * k, H], weights of rows [N * k] -> [N, H]."""
        weighted = made * weights.to(made.dtype)[:, None]
        of_tokens: Tensor = weighted.index_select(0, choice.order.argsort()).unflatten(0, choice.chosen.shape)
        return of_tokens.sum(dim=1)

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=-1) if self._spec.score == "Softmax" else logits.sigmoid()

    def _choice(self, scores: Tensor) -> Choice:
        """The choice by scores [N, experts]."""
        biased = scores if self.balancing_bias is None else scores + self.balancing_bias
        chosen = biased.topk(self._spec.per_token, dim=-1).indices
        # Those of the first expert, then the second's, ...
        order = chosen.flatten().argsort(stable=True)
        return Choice(chosen, None, order, _counts(chosen.flatten(), self._count))

    def _weights(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """The weights of chosen experts, [N, k]; scores [N, experts]."""
        weights = scores.gather(-1, chosen)
        if self._spec.weights == "Renormalised":
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * float(self._spec.scale)

    def _auxiliary_loss(self, scores: Tensor) -> Tensor:
        """The auxiliary loss of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20) times its factor, summed over the
        tokens of all sequences: scores [B, T, experts] -> a scalar. The choices are those without the balancing bias,
        as there. It is of each sequence, so micro-batches and ranks do not matter."""
        if not self._factor:
            return scores.new_zeros(())
        chances = _chances(scores, self._spec)
        chosen = scores.detach().topk(self._spec.per_token, dim=-1).indices.flatten(1)  # [B, T * k]
        shares = _counts(chosen, self._count).to(scores.dtype) / chosen.shape[1]  # [B, experts]
        return self._factor * self._count * (shares * chances.sum(dim=1)).sum()

    def _z_loss(self, logits: Tensor) -> Tensor:
        """The z-loss of ST-MoE (arXiv 2202.08906, equation 5) times its factor, summed over tokens: logits [B, T,
        experts] -> a scalar."""
        if not self._z_factor:
            return logits.new_zeros(())
        return self._z_factor * logits.logsumexp(dim=-1).square().sum()


def _copies(tokens: Tensor, choices: int) -> Tensor:
    """A copy of each token for each choice, [N, H] -> [N * k, H]: each is in the order of the experts once, so no sum
    in the backward pass depends on the order in which a GPU's threads come."""
    return tokens[:, None].expand(-1, choices, -1).flatten(0, 1)


def _chances(scores: Tensor, spec: TopK) -> Tensor:
    """The scores of each token as shares of their sum, [..., experts]."""
    return scores if spec.score == "Softmax" else scores / scores.sum(dim=-1, keepdim=True)


def _counts(choices: Tensor, experts: int) -> Tensor:
    """How often each expert is chosen: choices [..., n] -> [..., experts]. Nothing is read back from the device:
    `bincount` would be."""
    none = zeros((*choices.shape[:-1], experts), dtype=choices.dtype, device=choices.device)
    return none.scatter_add(-1, choices, ones_like(choices))
