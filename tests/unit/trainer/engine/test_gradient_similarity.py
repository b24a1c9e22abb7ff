"""Gradients of single layers, measured while the layers share blocks, against plain autograd on copies of the
layers."""

import json
from functools import partial
from itertools import pairwise

import pytest
import torch
from pseudoreal_api.resolved.layers import groups_of_layers
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.engine.gradient_similarity import LayerGradients, LayerGroup, groups_of
from pseudoreal_trainer.model.reference import Transformer, build_model
from pseudoreal_trainer.plan.layout import Layout
from torch import Tensor
from torch.nn import functional as F

from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.cases import SEED, STEPS, Case
from tests.unit.trainer.engine.support.running import Result, want

OWN = (4, "Cycle")
BALANCED = {"type": "TopK", "count": 4, "topK": {"perToken": 2, "biasUpdateRate": "0.1"}}
"""A balancing bias has no gradient."""
MEASURED = [
    Case(blocks=1, next_sharing=OWN),
    Case(blocks=1, next_sharing=OWN, keep="All", clipping="Global"),
    Case(blocks=1, next_sharing=(2, "Segment"), micro_batches=1),
    Case(blocks=1, next_sharing=(2, "Cycle"), homes="hD"),
    Case(blocks=2, pattern="Segment", next_sharing=OWN),
    Case(blocks=2, pattern="Cycle", next_sharing=OWN, order="1F1B"),
    Case(blocks=1, next_sharing=OWN, data=2),
    Case(blocks=2, next_sharing=OWN, data=2, options="Qwen3MoE"),
    Case(blocks=2, next_sharing=OWN, data=2, drawn=json.dumps({"experts": BALANCED})),
    Case(blocks=1, next_sharing=(2, "Cycle"), data=2, sharding="Full", homes="h", clipping="PerUnit"),
    Case(part="Experts", blocks=2, next_sharing=OWN, data=2, options="Qwen3MoE"),
    Case(part="Experts", blocks=1, next_sharing=(2, "Cycle"), pipeline=2, drawn=json.dumps({"experts": BALANCED})),
    *(
        Case(part=part, blocks=2, next_sharing=OWN, data=2, expert_ranks=2, drawn=json.dumps({"experts": BALANCED}))
        for part in ("Blocks", "Experts")
    ),
    Case(blocks=2, next_sharing=OWN, data=2, sharding="Full", expert_groups=2, drawn=json.dumps({"experts": BALANCED})),
    Case(
        part="Experts",
        blocks=1,
        next_sharing=(2, "Cycle"),
        pipeline=2,
        drawn=json.dumps({"experts": BALANCED}),
        expert_groups=4,
        homes="h",
    ),
    *(
        Case(blocks=1, next_sharing=OWN, pipeline=2, order=order)
        for order in ("Layered", "GPipe", "1F1B", "Interleaved")
    ),
    Case(blocks=1, next_sharing=(2, "Segment"), pipeline=2, micro_batches=4),
    Case(blocks=1, next_sharing=(2, "Cycle"), pipeline=2, order="GPipe"),
    Case(blocks=2, pattern="Cycle", next_sharing=OWN, pipeline=2),
    Case(blocks=2, pattern="Segment", next_sharing=OWN, pipeline=2, clipping="PerUnit"),
    Case(blocks=1, layers=5, next_sharing=(5, "Cycle"), pipeline=2),
    Case(blocks=1, next_sharing=OWN, pipeline=4, micro_batches=4, clipping="Global"),
    Case(blocks=1, next_sharing=(2, "Segment"), pipeline=2, data=2, sharding="Full", homes="hD"),
    Case(blocks=1, next_sharing=(2, "Cycle"), data=4, replicas=2, sharding="Full", homes="hd"),
]
want(MEASURED)


def _gradients_of_layers(case: Case) -> list[dict[str, Tensor]]:
    """Return the gradients of layers in the first step, by ordinary autograd on a model in which each layer has a copy
    of its block."""
    shared = build_model(case.model, case.sharing, SEED, torch.float64)
    copies = Transformer(case.model, Sharing(blocks=case.layers)).double()
    copies.load_state_dict(shared.state_dict(), strict=False)
    for layer, block in enumerate(shared.layer_blocks):
        copies.blocks[layer].load_state_dict(shared.blocks[block].state_dict())
    windows = reference.batch_of(case, 0).flatten(0, 1)
    F.cross_entropy(copies(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).backward()
    return [{name: p.grad for name, p in block.named_parameters() if p.grad is not None} for block in copies.blocks]


def _expected(case: Case) -> LayerGradients:
    layers = _gradients_of_layers(case)
    assert case.following is not None, "it is measured for the next phase"
    numbers, later = _positions_that_share(case, case.sharing), _positions_that_share(case, case.following)

    def squares(group: list[int], name: str) -> list[float]:
        """Return one sum of squares, or one per expert."""
        summed = torch.stack([layers[layer][name] for layer in group]).sum(dim=0)
        of_each = summed if name.startswith("experts.") else summed[None]
        found: list[float] = of_each.square().flatten(1).sum(dim=1).tolist()
        return found

    def layers_of(assignment: tuple[int, ...], block: int) -> list[int]:
        return [layer for layer, used in enumerate(assignment) if used == block]

    shared, single = {}, {}
    for number in {*numbers} - {-1}:
        uses = layers_of(numbers, number)
        targets = sorted({later[layer] for layer in uses})
        # Experts that layers alone share have the number of the first of these.
        owner = uses[0] if case.part == "Experts" else number
        for name in filter(partial(_is_shared, case), layers[uses[0]]):
            shared[f"blocks.{owner}.{name}"] = squares(uses, name)
            found = [squares(layers_of(later, target), name) for target in targets]
            single[f"blocks.{owner}.{name}"] = torch.tensor(found, dtype=torch.float64).mean(dim=0).tolist()
    pairs = [pair for number in sorted({*numbers} - {-1}) for pair in pairwise(layers_of(numbers, number))]
    return LayerGradients(shared, single, tuple(_cosine(case, layers, *pair) for pair in sorted(pairs)))


def _positions_that_share(case: Case, sharing: Sharing) -> tuple[int, ...]:
    """Return the group of each layer; -1 for a layer with nothing to share."""
    groups = groups_of_layers(sharing, case.layers)
    needs_experts = case.part == "Experts"
    return tuple(-1 if needs_experts and not case.model.has_experts(i) else group for i, group in enumerate(groups))


def _is_shared(case: Case, name: str) -> bool:
    return case.part == "Blocks" or name.startswith("experts.")


def _cosine(case: Case, layers: list[dict[str, Tensor]], one: int, other: int) -> float:
    names = [name for name in layers[one] if _is_shared(case, name)]
    flat = [torch.cat([layers[layer][name].flatten() for name in names]) for layer in (one, other)]
    return float(F.cosine_similarity(flat[0], flat[1], dim=0))


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.name)
def test_gradient_similarity_agrees_with_autograd_on_unshared_copies(
    case: Case, engine_results: dict[Case, list[Result]]
) -> None:
    expected, found = _expected(case), engine_results[case][0].measured[0]
    for measured, known in ((found.shared, expected.shared), (found.single, expected.single)):
        assert measured.keys() == known.keys()
        assert all(measured[name] == pytest.approx(known[name], rel=1e-10) for name in known)
    assert found.correlations == pytest.approx(expected.correlations, rel=1e-10)
    assert min(min(values) for values in found.single.values()) > 0
    assert len({round(c, 6) for c in found.correlations}) == len(found.correlations), "the pairs differ"


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.name)
def test_gradient_similarity_is_the_same_on_all_ranks(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    assert len(engine_results[case]) == case.world
    assert all(result.measured == engine_results[case][0].measured for result in engine_results[case])
    assert len(engine_results[case][0].measured) == STEPS


@pytest.mark.parametrize("case", MEASURED[:9], ids=lambda case: case.name)
def test_measuring_gradient_similarity_changes_no_weight(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    losses, weights = reference.train(case)
    assert engine_results[case][0].losses == pytest.approx(losses, rel=1e-12, abs=1e-12)
    for name, expected in weights.items():
        torch.testing.assert_close(engine_results[case][0].weights[name], expected, rtol=0, atol=1e-12)


def test_layer_groups_follow_the_sharing_of_this_phase_and_the_next() -> None:
    """Layers 0, 2 and 5 have block 0, layers 1 and 3 block 1. Layer 4 has its own block, which is measured already."""
    layout = Layout(layer_blocks=(0, 1, 0, 1, 2, 0), pipeline=1, data=1, micro_batches=1)
    assert groups_of(layout, (0, 1, 2, 1, 3, 2)) == (
        LayerGroup(units=(1,), positions=(1, 3, 6), is_shared=True),
        LayerGroup(units=(2,), positions=(2, 4), is_shared=True),
        LayerGroup(units=(1,), positions=(1,), is_shared=False),
        LayerGroup(units=(2,), positions=(2, 4), is_shared=False),
        LayerGroup(units=(1,), positions=(3, 6), is_shared=False),
    )


def test_experts_have_layer_groups_of_their_own() -> None:
    """Layers 1 and 3 have experts, and share only these; layers 0 and 2 are dense. The unit after the blocks is the
    experts' unit."""
    layout = Layout(layer_blocks=(0, 1, 2, 3), layer_experts=(None, 7, None, 7), pipeline=1, data=1, micro_batches=1)
    assert groups_of(layout, (0, 1, 2, 3), (None, 0, None, 1)) == (
        LayerGroup(units=(5,), positions=(2, 4), is_shared=True),
        LayerGroup(units=(5,), positions=(2,), is_shared=False),
        LayerGroup(units=(5,), positions=(4,), is_shared=False),
    )
