"""Attention within documents, in any layout: packed rows train the same as each document in a row of its own.

The reference has one pass per document, with positions from 0, and divides by the number of all targets of the step.
Micro-batches and ranks have unequal numbers of targets.
"""

import pytest
import torch

from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.cases import END, Case, each
from tests.unit.trainer.engine.support.running import Result, want

ORDERS = ["Layered", "GPipe", "1F1B", "Interleaved"]
FAMILIES = ["Llama3", "Qwen2", "Mistral", "OLMo2", "Mixtral", "Qwen3MoE"]
MASKED = [
    *each(documents=True, micro_batches=[1, 8], clipping="Global"),
    Case(documents=True, homes="D", window=1, blocks=2, stash=True),
    *each(documents=True, homes="hD", keep=["Products", "All"], order="1F1B", micro_batches=4),
    Case(documents=True, blocks=1, vocabulary=300, loss_chunk=5, z_loss="1e-3", tied=True),
    *each(documents=True, options=FAMILIES, homes="dhD", blocks=2, clipping="PerUnit"),
    Case(documents=True, experts=6, prototypes=1, homes="hD", micro_batches=1),
    Case(documents=True, experts=6, prototypes=3, homes="hD", micro_batches=4),
    *each(documents=True, pipeline=2, order=ORDERS, micro_batches=4),
    Case(documents=True, pipeline=2, blocks=1, homes="D", clipping="Global"),
    Case(documents=True, pipeline=2, keep="All", order="GPipe", options="Mistral", homes="h"),
    *each(documents=True, data=2, sharding=["None", "Full"], homes="hDd", clipping="Global"),
    Case(documents=True, data=2, sharding="Full", options="Qwen2", blocks=2, loss_chunk=7),
    Case(documents=True, data=2, sharding="Full", experts=4, keep="All", clipping="PerUnit"),
    Case(documents=True, pipeline=3, layers=6, homes="hD", options="Llama3"),
    Case(documents=True, pipeline=2, data=2, sharding="Full", blocks=2, homes="D", tied=True, clipping="PerUnit"),
]
"""With three pipeline ranks, the middle one has neither the embedding nor the head. Experts of prototypes are full in
documents of several tokens."""
want(MASKED)


@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.name)
def test_packed_documents_train_like_separate_documents(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    found = engine_results[case][0]
    losses, weights, moments = reference.train_with_moments(case)
    assert found.losses[0] == pytest.approx(losses[0], rel=1e-13)
    assert found.losses == pytest.approx(losses, rel=1e-12)
    found.assert_weights(weights)
    found.assert_first_moments(moments)


@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.name)
def test_evaluation_of_packed_documents_is_the_loss_of_separate_documents(
    case: Case, engine_results: dict[Case, list[Result]]
) -> None:
    expected = reference.evaluate(case, engine_results[case][0].weights)
    assert sum(result.evaluation for result in engine_results[case]) == pytest.approx(expected, rel=1e-12)


def test_cases_have_different_numbers_of_targets_per_rank_and_micro_batch() -> None:
    """With equal numbers, a mean of means would equal the mean."""
    windows = torch.cat([reference.batch_of(MASKED[0], step)[0] for step in range(5)])
    assert len({int((part[:, :-1] != END).sum()) for part in windows.split(2)}) > 3
