"""Balance of experts by top k, written down apart from the trainer's own: sums over tokens in plain loops, on what the
routers of a plain transformer put out."""

from collections.abc import Iterator
from typing import Any

import torch
from pseudoreal_api.spec.model import TopK
from pseudoreal_trainer.model.transformer import Transformer
from torch import Tensor


class Routers:
    """The routers of a transformer, while it is trained."""

    def __init__(self, model: Transformer) -> None:
        experts = model.spec.experts
        self._top_k = experts.top_k if experts else None
        self._sequence = model.spec.sequence_length
        self._layers = sum(map(model.spec.has_experts, range(model.spec.layers)))
        self._logits: list[tuple[int, Tensor]] = []
        """Block, and the logits of its router, [B, L, experts], for each layer with experts of the newest passes."""
        self._biases = dict(_biases(model))
        self.counts: list[Tensor] = []
        """For each layer with experts, the lowest first, the tokens of its experts since the step began, [experts]."""
        self.auxiliary_loss = 0.0
        """The auxiliary loss of the step so far, summed over its tokens."""
        self._blocks: list[int] = []
        if self._top_k is not None:
            blocks: list[Any] = [*model.blocks]
            for index, block in enumerate(blocks):
                if block.is_mixture:
                    block.router.register_forward_hook(self._hook(index))

    def _hook(self, block: int) -> Any:
        return lambda _module, _args, logits: self._logits.append((block, logits))

    def begin(self) -> None:
        """Begins a step."""
        self._logits, self.counts, self.auxiliary_loss = [], [], 0.0

    def take(self) -> Tensor | float:
        """The auxiliary losses of the passes that were made, summed over their tokens, which are counted. It was one of
        whole sequences, or they were one for each document of sequences, in their order."""
        if self._top_k is None:
            return 0.0
        passed, self._logits = [self._of_sequences(layer) for layer in range(self._layers)], []
        self._blocks = [block for block, _ in passed]
        found = [_tokens(self._top_k, logits, self._biases.get(block)) for block, logits in passed]
        self.counts = [a + b for a, b in zip(self.counts, found, strict=True)] if self.counts else found
        loss = sum((_auxiliary_loss(self._top_k, logits) for _, logits in passed), start=torch.tensor(0.0))
        self.auxiliary_loss += float(loss.detach())
        return loss

    def _of_sequences(self, layer: int) -> tuple[int, Tensor]:
        """Block, and the logits of whole sequences, [B, T, experts], whatever the passes were."""
        passes = self._logits[layer :: self._layers]
        tokens = torch.cat([logits.flatten(0, 1) for _, logits in passes])
        return passes[0][0], tokens.unflatten(0, (-1, self._sequence))

    def balance(self) -> None:
        """Changes the biases by the tokens of the step, summed over the layers of each block."""
        for block, bias in self._biases.items():
            assert self._top_k is not None
            layers = [counts for used, counts in zip(self._blocks, self.counts, strict=True) if used == block]
            tokens = sum(layers, start=torch.zeros_like(layers[0])).double()
            change = float(self._top_k.bias_update_rate or 0) * torch.sign(tokens.mean() - tokens)
            bias.data += change - change.mean()


def _biases(model: Transformer) -> Iterator[tuple[int, Tensor]]:
    for name, parameter in model.named_parameters():
        if name.endswith("balancing_bias"):
            yield int(name.split(".")[1]), parameter


def _scores(top_k: TopK, logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1) if top_k.score == "Softmax" else 1 / (1 + torch.exp(-logits))


def _tokens(top_k: TopK, logits: Tensor, bias: Tensor | None) -> Tensor:
    """How many tokens go to each expert, [experts]."""
    scores = _scores(top_k, logits.detach()).flatten(0, 1)
    return _most(scores if bias is None else scores + bias, top_k.per_token)


def _most(scores: Tensor, per_token: int) -> Tensor:
    """How often each expert is among the first of a token: [N, experts] -> [experts]."""
    counts = torch.zeros(scores.shape[1], dtype=torch.int64)
    for token in scores:
        for expert in token.argsort(descending=True)[:per_token]:
            counts[expert] += 1
    return counts


def _auxiliary_loss(top_k: TopK, logits: Tensor) -> Tensor:
    """Equations 17 to 20 of DeepSeek-V3, for each sequence by itself, times its tokens."""
    total, experts, length = torch.zeros((), dtype=logits.dtype), logits.shape[-1], logits.shape[1]
    for sequence in logits:
        scores = _scores(top_k, sequence)
        frequency = experts / (top_k.per_token * length) * _most(scores.detach(), top_k.per_token).double()
        probability = torch.stack([token / token.sum() for token in scores]).mean(dim=0)
        total = total + length * float(top_k.auxiliary_loss) * (frequency * probability).sum()
    return total
