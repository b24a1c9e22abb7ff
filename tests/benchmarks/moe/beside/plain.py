"""The model of our jobs as a plain module whose mixtures are a peer's: where every peer starts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.model.block import Block
from pseudoreal_trainer.model.transformer import Transformer, build_model
from torch import Tensor, nn

from tests.benchmarks.moe.beside.cases import LAYERS, RANKS, Case, job
from tests.benchmarks.moe.jobs import SEED


@dataclass(frozen=True)
class Weights:
    """First weights of a layer's mixture."""

    router: Tensor
    """[E, H]"""
    gate: Tensor
    """[E, F, H]"""
    up: Tensor
    """[E, F, H]"""
    down: Tensor
    """[E, H, F]"""


def plain_model(case: Case, mixture: Callable[[Weights], nn.Module]) -> Transformer:
    """`mixture`: makes the peer's part of a layer, [B, T, H] -> [B, T, H], with these weights."""
    model = build_model(job(case, "None").spec.model, Sharing(blocks=LAYERS), SEED, torch.float32)
    for block in model.blocks:
        assert isinstance(block, Block), "it was just built"
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
    """The part of [E, ...] whose experts are on this rank."""
    return stacked.chunk(RANKS)[rank]


def micro_batches(case: Case, batch: Tensor, rank: int, world: int) -> tuple[Tensor, ...]:
    """[sequences, T + 1] -> what this rank trains on, in turn: each [sequences / world / n, T + 1]"""
    return batch.chunk(world)[rank].chunk(case.micro_batches)
