"""Experts of which each token goes to the few that the router scores highest, as in Mixtral (arXiv 2401.04088) and
DeepSeek (arXiv 2412.19437). None is ever full, so no token depends on another."""

from pseudoreal_api.spec.model import Model, TopK
from torch import Tensor, nn, ones_like, zeros

from pseudoreal_trainer.model.feed_forward import FeedForward
from pseudoreal_trainer.model.grouped import grouped_or_one_by_one


class TopKExperts(nn.ModuleList):
    def __init__(self, spec: Model, top_k: TopK, count: int) -> None:
        super().__init__(FeedForward(spec.hidden_size, spec.expert) for _ in range(count))
        self._spec = top_k

    def forward(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """The weighted sum of the outputs of each token's experts: hidden [B, T, H], logits [B, T, experts] -> [B, T,
        H]."""
        weights, chosen = _chosen(self._spec, logits.flatten(0, 1))  # [N, k] both
        choices = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)  # [N * k], those of the first expert, then the second's, ...
        counts = _counts(chosen, len(self))
        # The only place where the host waits for the device.
        sizes: list[int] = counts.tolist()
        # A copy of each token for each choice, and each once in `order`: so no sum in the backward pass depends on the
        # order in which a GPU's threads come.
        copies = hidden.flatten(0, 1)[:, None].expand(-1, choices, -1).flatten(0, 1)  # [N * k, H]
        made = grouped_or_one_by_one([*self], copies.index_select(0, order), counts, sizes)
        placed = made.index_select(0, order.argsort()).unflatten(0, chosen.shape)  # [N, k, H]
        out: Tensor = (placed * weights.to(made.dtype)[..., None]).sum(dim=1)
        return out.view_as(hidden)


def _chosen(spec: TopK, logits: Tensor) -> tuple[Tensor, Tensor]:
    """For each token the weights and the numbers of its experts, [N, k]; logits [N, experts]."""
    scores = logits.softmax(dim=-1) if spec.score == "Softmax" else logits.sigmoid()
    weights, chosen = scores.topk(spec.per_token, dim=-1)
    if spec.weights == "Renormalised":
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * float(spec.scale), chosen


def _counts(chosen: Tensor, experts: int) -> Tensor:
    """How many tokens choose each expert, [experts]. Nothing is read back from the device: `bincount` would be."""
    choices = chosen.flatten()
    return zeros(experts, dtype=choices.dtype, device=choices.device).scatter_add(0, choices, ones_like(choices))
