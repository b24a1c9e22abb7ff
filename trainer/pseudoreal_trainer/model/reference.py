"""The whole model in one module and one process: the reference for the engine, which runs the same model unit by unit.

Tests compare the engine with this model. The model also generates the text of `pseudoreal sample` and the text logged
after a phase. `engine.evaluation` generates text during training, from the engine's own units.
"""

from collections.abc import Mapping, Sequence

import torch
from pseudoreal_api.resolved.layers import blocks_of_layers, experts_of_layers
from pseudoreal_api.spec.model import Model as ModelSpec
from pseudoreal_api.spec.phase import Sharing
from torch import Tensor, nn
from torch.nn import functional as F

from pseudoreal_trainer.model.attention import Documents, window_mask
from pseudoreal_trainer.model.block import Block
from pseudoreal_trainer.model.head import apply_soft_cap, logit_soft_cap
from pseudoreal_trainer.model.initialization import initial_weights
from pseudoreal_trainer.model.layers import rms_norm
from pseudoreal_trainer.model.rotary import rotary, rotation_at
from pseudoreal_trainer.model.sampling import Sampling, draw
from pseudoreal_trainer.plan.units import units_of


class Transformer(nn.Module):
    """Decoder-only transformer: embedding, layers, final norm, head. Layer l uses block `layer_blocks[l]`; blocks may
    share experts."""

    def __init__(self, spec: ModelSpec, sharing: Sharing) -> None:
        super().__init__()
        self.spec, self.layer_blocks = spec, blocks_of_layers(sharing, spec.layers)
        layers = [self.layer_blocks.index(block) for block in sorted(set(self.layer_blocks))]
        self.embedding = nn.Embedding(spec.vocabulary_size, spec.hidden_size)
        blocks = [Block(spec, layer) for layer in layers]
        for block, experts in zip(self.layer_blocks, experts_of_layers(sharing, spec), strict=False):
            if experts is not None and experts != block:
                blocks[block].use_experts_of(blocks[experts])
        self.blocks = nn.ModuleList(blocks)
        self.norm = rms_norm(spec, spec.hidden_size)
        separate = spec.embeddings == "Separate"
        self.head = nn.Linear(spec.hidden_size, spec.vocabulary_size, bias=False) if separate else None

    def forward(self, tokens: Tensor, documents: Documents | None = None) -> Tensor:
        """Return the logits of the next token: tokens [B, T] -> [B, T, V]. `documents`: attention stays within them;
        None: whole sequences."""
        hidden = self.embedding(tokens)  # [B, T, H]
        length, window = tokens.shape[1], self.spec.attention.window
        rotation = rotary(self.spec, length, hidden)
        if documents is not None:
            rotation = rotation_at(rotation, documents.positions)
        mask = None if window is None else window_mask(length, window.size, hidden)
        for layer, block in enumerate(self.layer_blocks):
            hidden = self.blocks[block](hidden, rotation, mask if self.spec.window_of(layer) else None, None, documents)
        matrix = self.embedding.weight if self.head is None else self.head.weight
        return apply_soft_cap(F.linear(self.norm(hidden), matrix), logit_soft_cap(self.spec))


def load_into(model: Transformer, weights: Mapping[str, Tensor]) -> None:
    """Load the weights. A parameter that several blocks share appears once."""
    assert weights.keys() == dict(model.named_parameters()).keys(), "the keys are the model's parameters"
    model.load_state_dict(weights, strict=False)


def build_model(spec: ModelSpec, sharing: Sharing, seed: int, dtype: torch.dtype) -> Transformer:
    """Return the whole model with its initial weights."""
    model = Transformer(spec, sharing).to(dtype)
    for index, unit in enumerate(units_of(spec, sharing)):
        model.load_state_dict(initial_weights(unit, index, spec, seed, dtype), strict=False)
    return model


@torch.no_grad()
def generate(model: Transformer, prompt: Sequence[int], count: int, sequence: int, sampling: Sampling) -> list[int]:
    """Return `count` tokens that continue a prompt of at least one token. `sequence`: maximum number of tokens of
    context. The same seed gives the same tokens."""
    generator = torch.Generator().manual_seed(sampling.seed)
    device = model.embedding.weight.device
    tokens = [*prompt]
    for _ in range(count):
        context = torch.tensor([tokens[-sequence:]], device=device)
        tokens.append(draw(model(context)[0, -1], sampling, generator))
    return tokens[len(prompt) :]
