"""Top-k experts: each token goes to the experts that the router scores highest, as in Mixtral (arXiv 2401.04088) and
DeepSeek (arXiv 2412.19437). No expert is ever full, so no token depends on another.

Two mechanisms keep experts in balance. A bias is added to the scores for the choice of experts only; between steps it
changes by the number of tokens of each expert. An auxiliary loss, over each sequence or over the whole step, has a
gradient. A z-loss keeps the router's outputs small.
"""

from collections.abc import Sequence

from pseudoreal_api.spec.model import Model, TopK
from torch import Tensor, nn, ones_like, zeros

from pseudoreal_trainer.model.attention import Documents
from pseudoreal_trainer.model.experts import Choice, KeptChoice, Routes, StepLoss, Tally, entropy_of
from pseudoreal_trainer.model.grouped import StackedFeedForward


class TopKExperts(StackedFeedForward):
    """Experts of a layer, with the routing of each token to its top k."""

    def __init__(self, spec: Model, top_k: TopK, count: int) -> None:
        super().__init__(count, spec.hidden_size, spec.expert)
        self._spec, self._count = top_k, count
        self._factor, self._z_factor = float(top_k.auxiliary_loss), float(top_k.router_z_loss)
        has_bias = top_k.bias_update_rate is not None
        self.balancing_bias = nn.Parameter(zeros(count), requires_grad=False) if has_bias else None

    def forward(
        self, hidden: Tensor, logits: Tensor, tally: Tally | None = None, *, kept: KeptChoice | None = None
    ) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts: hidden [B, T, H], logits [B, T, experts] ->
        [B, T, H]. `kept`: routing decision, made by this pass unless it was made before."""
        kept = kept or KeptChoice()
        routes = self.routes(logits, tally, choice=kept.choice)
        kept.choice = routes.choice
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
        """Return the routes for logits [B, T, experts]. `choice`: routing decision of an earlier pass. These experts
        are never full, so documents are not needed."""
        scores = self._scores(logits)  # [B, T, experts]
        of_tokens = scores.flatten(0, 1)
        choice = choice or self._choice(of_tokens.detach())
        weights = self._weights(of_tokens, choice.chosen)
        if tally is not None:
            choices, none = weights.shape[1], choice.counts.new_zeros(())
            entropy = choices * entropy_of(_chances(scores.detach(), self._spec))
            losses = self._loss_of_sequences(scores) + self._z_loss(logits)
            weights = tally.joined(weights, choice.counts, none, entropy, losses, self._loss_of_step(scores))
        return Routes(choice, weights)

    # Rows are the choices in the order of all experts; the experts may be on other ranks.

    def rows(self, tokens: Tensor, choice: Choice, counts: Sequence[int]) -> Tensor:  # noqa: ARG002
        """Return a row for each choice of each token: tokens [N, H] -> [N * k, H]."""
        return _copies(tokens, choice.chosen.shape[1]).index_select(0, choice.order)

    def weights_of_rows(self, routes: Routes, counts: Sequence[int]) -> Tensor:  # noqa: ARG002
        """Return the weights of the rows, [N * k]."""
        return routes.weights.flatten().index_select(0, routes.choice.order)

    def combined(self, made: Tensor, weights: Tensor, choice: Choice, counts: Sequence[int]) -> Tensor:  # noqa: ARG002
        """Return the experts' outputs added up for each token: made [N * k, H], weights of rows [N * k] -> [N, H]."""
        weighted = made * weights.to(made.dtype)[:, None]
        of_tokens: Tensor = weighted.index_select(0, choice.order.argsort()).unflatten(0, choice.chosen.shape)
        return of_tokens.sum(dim=1)

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=-1) if self._spec.score == "Softmax" else logits.sigmoid()

    def _choice(self, scores: Tensor) -> Choice:
        """Return the routing decision for scores [N, experts]."""
        biased = scores if self.balancing_bias is None else scores + self.balancing_bias
        chosen = biased.topk(self._spec.per_token, dim=-1).indices
        # Choices of the first expert, then of the second, ...
        order = chosen.flatten().argsort(stable=True)
        counts = _counts(chosen.flatten(), self._count)
        return Choice(chosen, None, order, counts, self._unbiased_counts(scores, counts))

    def _unbiased_counts(self, scores: Tensor, counts: Tensor) -> Tensor | None:
        """Return how often each expert is among the top k of scores [N, experts]; None if no loss needs the counts.
        `counts`: the same with the balancing bias."""
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

    def _loss_of_step(self, scores: Tensor) -> StepLoss | None:
        """Return these tokens' part of the auxiliary loss over the whole step (global-batch balance: Qiu et al., arXiv
        2501.11873); None without such a loss. scores [B, T, experts]."""
        if self._spec.balance_over != "Step":
            return None
        return StepLoss(_chances(scores, self._spec).sum(dim=(0, 1)), self._factor)

    def _loss_of_sequences(self, scores: Tensor) -> Tensor:
        """Return the auxiliary loss of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20) times its factor, summed over
        the tokens of all sequences: scores [B, T, experts] -> a scalar.

        As in DeepSeek-V3, choices are counted without the balancing bias. The loss is computed per sequence, so
        micro-batches and ranks do not matter.
        """
        if not self._factor or self._spec.balance_over != "Sequence":
            return scores.new_zeros(())
        chances = _chances(scores, self._spec)
        chosen = scores.detach().topk(self._spec.per_token, dim=-1).indices.flatten(1)  # [B, T * k]
        shares = _counts(chosen, self._count).to(scores.dtype) / chosen.shape[1]  # [B, experts]
        return self._factor * self._count * (shares * chances.sum(dim=1)).sum()

    def _z_loss(self, logits: Tensor) -> Tensor:
        """Return the z-loss of ST-MoE (arXiv 2202.08906, equation 5) times its factor, summed over tokens: logits [B,
        T, experts] -> a scalar."""
        if not self._z_factor:
            return logits.new_zeros(())
        return self._z_factor * logits.logsumexp(dim=-1).square().sum()


def _copies(tokens: Tensor, choices: int) -> Tensor:
    """Return a copy of each token for each choice, [N, H] -> [N * k, H]. Each copy is selected once, so no sum in the
    backward pass depends on the order of a GPU's threads."""
    return tokens[:, None].expand(-1, choices, -1).flatten(0, 1)


def _chances(scores: Tensor, spec: TopK) -> Tensor:
    """Return the scores of each token as shares of their sum, [..., experts]."""
    return scores if spec.score == "Softmax" else scores / scores.sum(dim=-1, keepdim=True)


def _counts(choices: Tensor, experts: int) -> Tensor:
    """Return how often each expert is chosen: choices [..., n] -> [..., experts]. Nothing is read back from the device;
    `bincount` would read back."""
    none = zeros((*choices.shape[:-1], experts), dtype=choices.dtype, device=choices.device)
    return none.scatter_add(-1, choices, ones_like(choices))
