"""Tied embeddings: on any number of ranks, the one matrix gets the sum of both ends' gradients, and is updated once.

The oracle trains a model with two separate ends. It adds their gradients, clips and updates one of the two matrices,
and copies it to the other.
"""

import pytest
import torch
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.model.reference import Transformer, build_model
from torch import Tensor, nn

from tests.support.adamw import adamw
from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.cases import RATE, SEED, STEPS, Case, each
from tests.unit.trainer.engine.support.running import Result, want

PIPELINES = [
    *each(tied=True, pipeline=[1, 2, 3, 4], clipping="Global"),
    *each(tied=True, pipeline=[2, 3], order=["GPipe", "1F1B"]),
    Case(tied=True, pipeline=2, order="Interleaved", clipping="PerUnit", loss_chunk=7),
    *each(tied=True, pipeline=[1, 2], homes="D", window=1, clipping="PerUnit"),
    Case(tied=True, layers=5, pipeline=2, clipping="PerUnit"),
    *each(tied=True, data=2, sharding=["None", "Full"], clipping="Global"),
    Case(tied=True, pipeline=2, data=2, sharding="Full", homes="hD", vocabulary=301, clipping="PerUnit"),
    Case(tied=True, pipeline=2, data=2, sharding="Optimizer", blocks=1, clipping="Global", z_loss="1e-3"),
]
"""With 5 layers in layered order, both ends are on the first of two ranks. 301 rows make shards with unequal
contents."""
want(PIPELINES)


def _train(case: Case) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Return the losses of all steps, and the final weights and first moments."""
    model = _separate(case)
    assert model.head is not None
    named = {name: p for name, p in model.named_parameters() if name != "head.weight"}
    optimizer = adamw(named.values(), case.optimizer, RATE)
    losses = []
    for step in range(STEPS):
        losses.append(reference.set_gradients(model, case, step))
        assert model.embedding.weight.grad is not None
        assert model.head.weight.grad is not None
        model.embedding.weight.grad += model.head.weight.grad
        _clip(named, case)
        optimizer.step()
        model.head.weight.data.copy_(model.embedding.weight)
    moments = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in named.items()}
    return losses, {name: parameter.detach() for name, parameter in named.items()}, moments


def _separate(case: Case) -> Transformer:
    """Return the case's initial model with a separate head that is a copy of the embedding."""
    tied = build_model(case.model, case.sharing, SEED, torch.float64)
    spec = case.model.model_copy(update={"embeddings": "Separate"})
    model = Transformer(spec, Sharing(blocks=case.sharing.blocks)).double()
    model.load_state_dict(tied.state_dict() | {"head.weight": tied.state_dict()["embedding.weight"]})
    return model


def _clip(named: dict[str, nn.Parameter], case: Case) -> None:
    bound = float(case.optimizer.clipping.norm)
    if case.clipping == "Global":
        nn.utils.clip_grad_norm_(named.values(), bound)
    elif case.clipping == "PerUnit":
        ends = [parameter for name, parameter in named.items() if not name.startswith("blocks.")]
        blocks = [
            [parameter for name, parameter in named.items() if name.startswith(f"blocks.{block}.")]
            for block in range(case.sharing.blocks)
        ]
        for unit in (ends, *blocks):
            nn.utils.clip_grad_norm_(unit, bound)


@pytest.mark.parametrize("case", PIPELINES, ids=lambda case: case.name)
def test_gradient_of_tied_embeddings_is_the_sum_of_both_ends(
    case: Case, engine_results: dict[Case, list[Result]]
) -> None:
    found = engine_results[case][0]
    losses, weights, moments = _train(case)
    assert found.losses == pytest.approx(losses, rel=1e-12)
    found.assert_weights(weights)
    found.assert_first_moments(moments)


@pytest.mark.parametrize("case", PIPELINES, ids=lambda case: case.name)
def test_evaluation_with_tied_embeddings_is_the_loss_of_the_weights(
    case: Case, engine_results: dict[Case, list[Result]]
) -> None:
    expected = reference.evaluate(case, engine_results[case][0].weights)
    assert sum(result.evaluation for result in engine_results[case]) == pytest.approx(expected, rel=1e-12)


def test_the_first_logits_of_a_tied_model_are_of_the_size_of_one() -> None:
    """With an embedding of size one, the initial size of a separate embedding, they would have the size of the root of
    the width."""
    wide = Case(tied=True).model.model_copy(update={"hidden_size": 256})
    model = build_model(wide, Sharing(blocks=4), SEED, torch.float64)
    logits = model(torch.arange(200).view(20, 10))
    assert 0.5 < float(logits.detach().std()) < 2
