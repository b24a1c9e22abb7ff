"""Independent reference of expert load balancing: plain loops over tokens, on the router outputs of a plain
transformer."""

from collections.abc import Iterator
from math import ceil, log
from typing import Any

import torch
from pseudoreal_api.spec.model import TopK
from pseudoreal_trainer.model.reference import Transformer
from torch import Tensor


class Routers:
    """The routers of a transformer during its training."""

    def __init__(self, model: Transformer) -> None:
        experts = model.spec.experts
        self._top_k, self._experts = (experts.top_k if experts else None), experts
        self._sequence = model.spec.sequence_length
        self._layers = sum(map(model.spec.has_experts, range(model.spec.layers)))
        self._logits: list[tuple[int, Tensor]] = []
        """Block and router logits, [B, L, experts], of each layer with experts in the newest passes."""
        self._biases = dict(_biases(model))
        self.counts: list[Tensor] = []
        """Tokens per expert since the start of the step, [experts], for each layer with experts, lowest layers
        first."""
        self.auxiliary_loss = 0.0
        """Auxiliary loss of the step so far, summed over its tokens."""
        self.entropies: list[float] = []
        """Entropy of each routing distribution since the start of the step."""
        self.refused = 0
        """Number of routing decisions refused by full experts since the start of the step."""
        self._blocks: list[int] = []
        if experts is not None:
            blocks: list[Any] = [*model.blocks]
            for index, block in enumerate(blocks):
                if block.is_mixture:
                    block.router.register_forward_hook(self._hook(index))

    def _hook(self, block: int) -> Any:
        return lambda _module, _args, logits: self._logits.append((block, logits))

    def begin(self) -> None:
        """Start a step."""
        self._logits, self.counts, self.auxiliary_loss = [], [], 0.0
        self.entropies, self.refused = [], 0

    @property
    def entropy(self) -> float:
        return sum(self.entropies) / len(self.entropies)

    def take(self) -> Tensor | float:
        """Return the auxiliary losses of the newest passes, summed over their tokens, and count these tokens.

        The passes were one over whole sequences, or one per document of the sequences, in order.
        """
        if self._experts is None:
            return 0.0
        if self._top_k is None:
            self._count([self._of_prototypes(logits) for _, logits in self._logits])
            self._logits = []
            return 0.0
        passed, self._logits = [self._of_sequences(layer) for layer in range(self._layers)], []
        self._blocks = [block for block, _ in passed]
        self._count([_tokens(self._top_k, logits, self._biases.get(block)) for block, logits in passed])
        for _, logits in passed:
            self.entropies += [_entropy(_scores(self._top_k, token)) for token in logits.detach().flatten(0, 1)]
        loss = sum((_auxiliary_loss(self._top_k, logits) for _, logits in passed), start=torch.tensor(0.0))
        self.auxiliary_loss += float(loss.detach())
        return loss

    def _count(self, passes: list[Tensor]) -> None:
        """Add the token counts of passes: the layers of a step in order, once or several times."""
        for index, counts in enumerate(passes):
            if len(self.counts) < self._layers:
                self.counts.append(counts)
            else:
                self.counts[index % self._layers] = self.counts[index % self._layers] + counts

    def _of_prototypes(self, logits: Tensor) -> Tensor:
        """Return the number of tokens choosing each expert, [experts], for logits [B, T, experts] of rows limited by
        the capacity."""
        assert self._experts is not None
        size = self._experts.count // self._experts.prototypes
        capacity = ceil(float(self._experts.capacity_factor) * self._sequence / size)
        counts = torch.zeros(self._experts.count, dtype=torch.int64)
        for row in logits.detach():
            chosen = [0] * self._experts.count
            for token in row:
                for first in range(0, self._experts.count, size):
                    group = token[first : first + size]
                    chosen[first + int(group.argmax())] += 1
                    self.entropies.append(_entropy(group.exp()))
            counts += torch.tensor(chosen)
            self.refused += sum(max(0, number - capacity) for number in chosen)
        return counts

    def _of_sequences(self, layer: int) -> tuple[int, Tensor]:
        """Return the block, and the router logits of whole sequences, [B, T, experts], for any division into passes."""
        passes = self._logits[layer :: self._layers]
        tokens = torch.cat([logits.flatten(0, 1) for _, logits in passes])
        return passes[0][0], tokens.unflatten(0, (-1, self._sequence))

    def balance(self, *, rounds: bool = False) -> None:
        """Update the balancing biases by the step's tokens, summed over the layers of each block. `rounds`: whether the
        change is rounded to bfloat16, as gradients may be."""
        for block, bias in self._biases.items():
            assert self._top_k is not None
            layers = [counts for used, counts in zip(self._blocks, self.counts, strict=True) if used == block]
            tokens = sum(layers, start=torch.zeros_like(layers[0])).double()
            change = float(self._top_k.bias_update_rate or 0) * torch.sign(tokens.mean() - tokens)
            change = change - change.mean()
            bias.data += change.to(torch.bfloat16).double() if rounds else change


def _biases(model: Transformer) -> Iterator[tuple[int, Tensor]]:
    for name, parameter in model.named_parameters():
        if name.endswith("balancing_bias"):
            yield int(name.split(".")[1]), parameter


def _entropy(scores: Tensor) -> float:
    shares: list[float] = [score / float(scores.sum()) for score in scores.tolist()]
    return -sum(share * log(share) for share in shares)


def _scores(top_k: TopK, logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1) if top_k.score == "Softmax" else 1 / (1 + torch.exp(-logits))


def _tokens(top_k: TopK, logits: Tensor, bias: Tensor | None) -> Tensor:
    """Return the number of tokens sent to each expert, [experts]."""
    scores = _scores(top_k, logits.detach()).flatten(0, 1)
    return _most(scores if bias is None else scores + bias, top_k.per_token)


def _most(scores: Tensor, per_token: int) -> Tensor:
    """Return how often each expert is among the top `per_token` of a token: [N, experts] -> [experts]."""
    counts = torch.zeros(scores.shape[1], dtype=torch.int64)
    for token in scores:
        for expert in token.argsort(descending=True)[:per_token]:
            counts[expert] += 1
    return counts


def _auxiliary_loss(top_k: TopK, logits: Tensor) -> Tensor:
    """Return equations 17 to 20 of DeepSeek-V3 for each sequence, multiplied by its tokens, plus equation 5 of
    ST-MoE."""
    total, experts, length = torch.zeros((), dtype=logits.dtype), logits.shape[-1], logits.shape[1]
    for sequence in logits:
        scores = _scores(top_k, sequence)
        frequency = experts / (top_k.per_token * length) * _most(scores.detach(), top_k.per_token).double()
        probability = torch.stack([token / token.sum() for token in scores]).mean(dim=0)
        total = total + length * float(top_k.auxiliary_loss) * (frequency * probability).sum()
        total = total + sum(float(top_k.router_z_loss) * token.exp().sum().log() ** 2 for token in sequence)
    return total
