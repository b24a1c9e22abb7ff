"""Our jobs' model as a plain module with a peer's mixture layers; the base of every peer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.model.block import Block
from pseudoreal_trainer.model.transformer import Transformer, build_model
from torch import Tensor, nn

from benchmarks.moe.beside.cases import LAYERS, RANKS, Case, job
from benchmarks.moe.jobs import SEED


@dataclass(frozen=True)
class Weights:
    """Initial weights of a layer's mixture."""

    router: Tensor
    """[E, H]"""
    gate: Tensor
    """[E, F, H]"""
    up: Tensor
    """[E, F, H]"""
    down: Tensor
    """[E, H, F]"""


def plain_model(case: Case, mixture: Callable[[Weights], nn.Module]) -> Transformer:
    """Return the model. `mixture` makes the peer's layer, [B, T, H] -> [B, T, H], with these weights."""
    model = build_model(job(case, "None").spec.model, Sharing(blocks=LAYERS), SEED, torch.float32)
    for block in model.blocks:
        assert isinstance(block, Block), "build_model makes Blocks"
        block.add_module("ffn", mixture(_weights(block)))
        block.is_mixture = False
        del block.router, block.experts
    return model


@torch.no_grad()
def _weights(block: Block) -> Weights:
    def stacked(kind: str) -> Tensor:
        weights: Tensor = getattr(block.experts, kind).weight
        return weights.clone()

    return Weights(block.router.weight.clone(), stacked("gate"), stacked("up"), stacked("down"))


def local(stacked: Tensor, rank: int) -> Tensor:
    """Return the slice of [E, ...] with the experts of this rank."""
    return stacked.chunk(RANKS)[rank]


def micro_batches(case: Case, batch: Tensor, rank: int, world: int) -> tuple[Tensor, ...]:
    """Return this rank's micro-batches in order: [sequences, T + 1] -> n times [sequences / world / n, T + 1]."""
    return batch.chunk(world)[rank].chunk(case.micro_batches)
