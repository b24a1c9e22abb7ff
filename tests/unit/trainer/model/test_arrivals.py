"""Expert parallelism simulated in one process: each rank's computation against one pass over the joined batch."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from pseudoreal_api.spec.model import Model
from pseudoreal_trainer.model.block import Block
from pseudoreal_trainer.model.grouped import StackedFeedForward, rows_by_expert
from torch import Tensor

pytestmark = pytest.mark.processor

KINDS = {
    "prototypes": {"count": 8, "prototypes": 2, "capacityFactor": "0.75"},
    "one prototype, roomy": {"count": 4, "capacityFactor": "4"},
    "top k": {"type": "TopK", "count": 8, "topK": {"perToken": 3}},
    "sigmoid": {"type": "TopK", "count": 4, "topK": {"perToken": 2, "score": "Sigmoid", "scale": "2.5"}},
}
TYPES = (torch.float64, torch.float32, torch.bfloat16)
HIDDEN, LENGTH, SEQUENCES = 16, 16, 4
"""64 router scores per sequence and 4 experts: whole vectors on every processor, see the first test."""


def _block(kind: str, dtype: torch.dtype) -> Block:
    fields = {"layers": 1, "hiddenSize": HIDDEN, "attention": {"heads": 2}, "sequenceLength": LENGTH}
    block = Block(Model.model_validate(fields | {"feedForward": {"size": 64}, "experts": KINDS[kind]})).to(dtype)
    generator = torch.Generator().manual_seed(5)
    for parameter in block.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype) / 4
    return block


def _of_rank(experts: Any, own: range) -> StackedFeedForward:
    """Return the experts of one rank: its slices of all stacked tensors."""
    some: StackedFeedForward = copy.deepcopy(experts)
    for name, parameter in some.named_parameters():
        if name != "balancing_bias":
            parameter.data = parameter.data[own.start : own.stop]
    return some


def _spread(block: Block, features: list[Tensor], logits: list[Tensor]) -> list[Tensor]:
    """Return each rank's outputs, [B, T, H], from its features [B, T, H] and logits [B, T, experts]. The exchange of
    rows between ranks is simulated."""
    experts, ranks = block.experts, len(features)
    count = len(block.router.weight) // ranks
    routes = [experts.routes(part) for part in logits]
    sent = [r.decision.counts.flatten().tolist() for r in routes]
    rows = [
        experts.rows(part.flatten(0, 1), r.decision, s).split(s)
        for part, r, s in zip(features, routes, sent, strict=True)
    ]
    back: list[list[Tensor]] = [[] for _ in range(ranks)]
    for owner in range(ranks):
        own = range(owner * count, (owner + 1) * count)
        came = torch.cat([rows[source][expert] for source in range(ranks) for expert in own])
        counts = torch.tensor([[sent[source][expert] for expert in own] for source in range(ranks)])
        places, sizes = rows_by_expert(counts, len(came)), counts.sum(dim=0)
        made = _of_rank(experts, own).outputs(came.index_select(0, places), sizes, sizes.tolist())
        made = torch.empty_like(came).index_copy_(0, places, made)
        for source, part in enumerate(made.split(counts.sum(dim=1).tolist())):
            back[source].append(part)
    return [
        experts.combine(torch.cat(parts), experts.row_weights(r, s), r.decision, s).view_as(part)
        for parts, r, s, part in zip(back, routes, sent, features, strict=True)
    ]


@pytest.mark.parametrize(("kind", "dtype", "ranks"), [*product(KINDS, TYPES, (1, 2, 4))])
@torch.no_grad()
def test_spread_experts_are_those_of_the_joined_batch_to_the_bit(kind: str, dtype: torch.dtype, ranks: int) -> None:
    """Two sources of different rounding are excluded. Elementwise functions (GELU, sigmoid) run in vector loops of up
    to 64 numbers (four vectors of 512 bits, float32) with another code path for the remainder: all tensors here are
    whole loops. Matrix products may add in another order for another number of rows: the router runs once for the whole
    batch, and an expert gets the same rows either way."""
    block = _block(kind, dtype)
    whole = torch.randn(SEQUENCES, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(7)).to(dtype)
    logits = block.router(whole)
    expected = block.experts(whole, logits)
    found = torch.cat(_spread(block, [*whole.chunk(ranks)], [*logits.chunk(ranks)]))
    assert torch.equal(found, expected)
    assert expected.abs().sum() > 0


@torch.no_grad()
def test_a_rank_without_tokens_takes_part() -> None:
    block = _block("top k", torch.float64)
    whole = torch.randn(SEQUENCES, LENGTH, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    logits = block.router(whole)
    found = _spread(block, [whole, whole[:0]], [logits, logits[:0]])
    assert torch.equal(found[0], block.experts(whole, logits))
    assert found[1].shape == (0, LENGTH, HIDDEN)


def test_rows_are_found_expert_by_expert_in_the_order_of_the_ranks() -> None:
    """The expected order is found by plain loops over the received rows."""
    counts = torch.randint(0, 4, (3, 5), generator=torch.Generator().manual_seed(1))
    counts[1] = 0
    counts[:, 2] = 0
    came = [(rank, expert) for rank in range(3) for expert in range(5) for _ in range(int(counts[rank, expert]))]
    places = rows_by_expert(counts, len(came)).tolist()
    assert sorted(places) == [*range(len(came))]
    assert [came[place][::-1] for place in places] == sorted((expert, rank) for rank, expert in came)
    assert places == sorted(places, key=lambda place: (came[place][1], place)), "rows of a rank keep their order"


def test_a_choice_is_not_made_again() -> None:
    """With a given routing decision, other scores change the weights but not the experts."""
    for kind in KINDS:
        block = _block(kind, torch.float64)
        logits = torch.randn(2, LENGTH, len(block.router.weight), dtype=torch.float64)
        first = block.experts.routes(logits)
        again = block.experts.routes(-logits, decision=first.decision)
        assert again.decision is first.decision
        fresh = block.experts.routes(-logits)
        assert not torch.equal(fresh.decision.chosen, first.decision.chosen)
