"""Layers computed in chunks of the sequence, against the plain reference: losses and weights to 1e-12 in float64."""

import json

import pytest

from tests.unit.trainer.engine.support.agreement import (
    assert_evaluated_alike,
    assert_trained_alike,
    assert_written_alike,
)
from tests.unit.trainer.engine.support.cases import Case, each
from tests.unit.trainer.engine.support.running import Result, sound, want

LONG = json.dumps({"sequenceLength": 12})
CASES = [
    *each(sequence_chunks=[2, 4, 9], homes=["d", "hD"], clipping="Global"),
    *each(sequence_chunks=3, options=["Llama3", "Qwen2", "Mistral", "all biases and norms"], documents=[False, True]),
    *each(sequence_chunks=2, options=["Qwen3MoE", "in balance"], micro_batches=3),
    Case(sequence_chunks=2, products="Float8", activation="SwiGLU"),
    Case(sequence_chunks=4, stash=True, homes="h", window=1, blocks=2, tied=True),
    Case(sequence_chunks=2, layers=4, blocks=2, next_sharing=(4, "Cycle")),
    *each(sequence_chunks=3, data=2, context_ranks=2, drawn=LONG, documents=[False, True], sharding="Full"),
    *each(sequence_chunks=3, pipeline=2, order=["Layered", "1F1B"], micro_batches=4, documents=True),
    # A micro-batch has one sequence: one rank has none.
    Case(sequence_chunks=2, data=2, sequences=1),
]
WRITTEN = [case for case in CASES if case.products == "Compute"][::5]
want(CASES)
want(WRITTEN, written=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_in_chunks_equals_the_reference(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    assert_trained_alike(sound(engine_results, case), case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_evaluation_in_chunks_equals_the_reference(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    assert_evaluated_alike(engine_results, case)


@pytest.mark.parametrize("case", WRITTEN, ids=lambda case: case.name)
def test_text_is_the_text_of_a_plain_model(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    assert_written_alike(engine_results, case)
