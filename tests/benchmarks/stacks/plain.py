"""The model as a plain module: where every peer starts."""

import torch
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.model.transformer import Transformer, build_model

from tests.benchmarks.stacks.recompute import recompute_blocks
from tests.benchmarks.work import Work


def plain_model(work: Work) -> Transformer:
    """Nothing is shared: one block for each layer."""
    model = build_model(work.model, Sharing(blocks=work.model.layers), work.seed, torch.float32)
    if work.recompute:
        recompute_blocks(model)
    return model
