"""Experts of which each token goes to the few that the router scores highest, as in Mixtral (arXiv 2401.04088) and
DeepSeek (arXiv 2412.19437). None is ever full, so no token depends on another.

Two things keep experts in balance. A bias is added to the scores where experts are chosen, and nowhere else; between
steps it changes by the number of tokens that each expert got. An auxiliary loss of each sequence has a gradient. A
z-loss keeps the router's outputs small.
"""

from pseudoreal_api.spec.model import Model, TopK
from torch import Tensor, nn, ones_like, zeros

from pseudoreal_trainer.model.experts import Tally, entropy_of
from pseudoreal_trainer.model.feed_forward import FeedForward
from pseudoreal_trainer.model.grouped import grouped_or_one_by_one


class TopKExperts(nn.ModuleList):
    def __init__(self, spec: Model, top_k: TopK, count: int) -> None:
        super().__init__(FeedForward(spec.hidden_size, spec.expert) for _ in range(count))
        self._spec = top_k
        self._factor, self._z_factor = float(top_k.auxiliary_loss), float(top_k.router_z_loss)
        has_bias = top_k.bias_update_rate is not None
        self.balancing_bias = nn.Parameter(zeros(count), requires_grad=False) if has_bias else None

    def forward(self, hidden: Tensor, logits: Tensor, tally: Tally | None = None) -> Tensor:
        """The weighted sum of the outputs of each token's experts: hidden [B, T, H], logits [B, T, experts] -> [B, T,
        H]."""
        scores = self._scores(logits)  # [B, T, experts]
        weights, chosen = self._chosen(scores.flatten(0, 1))  # [N, k] both
        choices = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)  # [N * k], those of the first expert, then the second's, ...
        counts = _counts(chosen.flatten(), len(self))
        if tally is not None:
            entropy, none = choices * entropy_of(_chances(scores.detach(), self._spec)), counts.new_zeros(())
            losses = self._auxiliary_loss(scores) + self._z_loss(logits)
            weights = tally.joined(weights, counts, none, entropy, losses)
        # The only place where the host waits for the device.
        sizes: list[int] = counts.tolist()
        # A copy of each token for each choice, and each once in `order`: so no sum in the backward pass depends on the
        # order in which a GPU's threads come.
        copies = hidden.flatten(0, 1)[:, None].expand(-1, choices, -1).flatten(0, 1)  # [N * k, H]
        made = grouped_or_one_by_one([*self], copies.index_select(0, order), counts, sizes)
        placed = made.index_select(0, order.argsort()).unflatten(0, chosen.shape)  # [N, k, H]
        out: Tensor = (placed * weights.to(made.dtype)[..., None]).sum(dim=1)
        return out.view_as(hidden)

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=-1) if self._spec.score == "Softmax" else logits.sigmoid()

    def _chosen(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """For each token the weights and the numbers of its experts, [N, k]; scores [N, experts]."""
        if self.balancing_bias is None:
            weights, chosen = scores.topk(self._spec.per_token, dim=-1)
        else:
            chosen = (scores.detach() + self.balancing_bias).topk(self._spec.per_token, dim=-1).indices
            weights = scores.gather(-1, chosen)
        if self._spec.weights == "Renormalised":
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * float(self._spec.scale), chosen

    def _auxiliary_loss(self, scores: Tensor) -> Tensor:
        """The auxiliary loss of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20) times its factor, summed over the
        tokens of all sequences: scores [B, T, experts] -> a scalar. The choices are those without the balancing bias,
        as there. It is of each sequence, so micro-batches and ranks do not matter."""
        if not self._factor:
            return scores.new_zeros(())
        chances = _chances(scores, self._spec)
        chosen = scores.detach().topk(self._spec.per_token, dim=-1).indices.flatten(1)  # [B, T * k]
        shares = _counts(chosen, len(self)).to(scores.dtype) / chosen.shape[1]  # [B, experts]
        return self._factor * len(self) * (shares * chances.sum(dim=1)).sum()

    def _z_loss(self, logits: Tensor) -> Tensor:
        """The z-loss of ST-MoE (arXiv 2202.08906, equation 5) times its factor, summed over tokens: logits [B, T,
        experts] -> a scalar."""
        if not self._z_factor:
            return logits.new_zeros(())
        return self._z_factor * logits.logsumexp(dim=-1).square().sum()


def _chances(scores: Tensor, spec: TopK) -> Tensor:
    """The scores of each token as shares of their sum, [..., experts]."""
    return scores if spec.score == "Softmax" else scores / scores.sum(dim=-1, keepdim=True)


def _counts(choices: Tensor, experts: int) -> Tensor:
    """How often each expert is chosen: choices [..., n] -> [..., experts]. Nothing is read back from the device:
    `bincount` would be."""
    none = zeros((*choices.shape[:-1], experts), dtype=choices.dtype, device=choices.device)
    return none.scatter_add(-1, choices, ones_like(choices))
