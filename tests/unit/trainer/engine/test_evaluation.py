"""Text that the model writes in training equals the text of a plain model with the same weights, in every layout and
home."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from math import nan
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_trainer.engine.evaluation import assign_sequences
from pseudoreal_trainer.engine.evaluation import generate as generate_with
from pseudoreal_trainer.model.reference import build_model, generate, load_into
from pseudoreal_trainer.model.sampling import Sampling, draw, skip

from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.cases import PROMPTS, SAMPLING, WRITTEN, Case
from tests.unit.trainer.engine.support.running import Result, want

ORDERS = ("Layered", "GPipe", "1F1B", "Interleaved")
DENSE = [
    *(Case(homes=homes, window=window, stash=homes == "D") for homes in ("d", "hD") for window in (1, 2)),
    Case(options="Llama3", blocks=2, homes="hD", keep="All"),
    Case(options="Mistral", pipeline=2, homes="D"),
    Case(vocabulary=300, soft_cap="2", loss_chunk=5, tied=True),
    *(Case(data=2, sharding=sharding, homes="hDd") for sharding in ("None", "Full")),
    *(Case(pipeline=2, order=order, micro_batches=8) for order in ORDERS),
    Case(pipeline=2, tied=True, homes="h"),
    Case(data=4, sharding="Full"),
    *(Case(pipeline=2, data=2, sharding="Full", order=order, homes="dhD") for order in ("Layered", "1F1B")),
]
"""One of four data ranks has no prompt of its own."""
WITH_EXPERTS = [
    Case(options="Mixtral", data=2, sharding="Full"),
    Case(experts=6, prototypes=2, pipeline=2, homes="hD"),
]
MASKED = [
    Case(documents=True, homes="hD"),
    Case(documents=True, pipeline=2, data=2, sharding="Full", options="Mistral"),
    Case(documents=True, data=2, experts=6, prototypes=2),
]
"""Tokens after the end of a document do not see the tokens before it."""
CASES = [*DENSE, *WITH_EXPERTS, *MASKED]
want(CASES, written=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_engine_generates_the_text_of_a_plain_model(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    results = engine_results[case]
    expected = reference.write(case, results[0].weights)
    assert len({*chain.from_iterable(expected)}) > 3, "it is drawn at random"
    for result in results:
        assert result.written == expected, "the same on every rank"


@pytest.mark.parametrize("case", [*DENSE, *WITH_EXPERTS], ids=lambda case: case.name)
def test_engine_generates_the_text_of_sampling_from_a_checkpoint(
    case: Case, engine_results: dict[Case, list[Result]]
) -> None:
    """Padding after a text does not affect the text."""
    model = build_model(case.model, case.sharing, seed=0, dtype=torch.float64)
    load_into(model, engine_results[case][0].weights)
    for number, (prompt, found) in enumerate(zip(PROMPTS, engine_results[case][0].written, strict=True)):
        sampling = replace(SAMPLING, seed=SAMPLING.seed + number)
        assert found == generate(model, prompt, WRITTEN, case.model.sequence_length, sampling)


def first_of_two_ranks(sum_: Callable[[torch.Tensor], torch.Tensor], logits: torch.Tensor) -> Any:
    """Return a stand-in for the engine of the first of two data ranks. `sum_`: sum over the ranks. `logits`: logits
    after every token."""
    mesh = SimpleNamespace(sequence_groups=2)
    layout, ranks = SimpleNamespace(mesh=mesh), SimpleNamespace(sum_=sum_)
    return SimpleNamespace(
        groups=SimpleNamespace(ranks=ranks, layout=layout, sequence_group=0, device="cpu"),
        blueprint=SimpleNamespace(end_of_document=None),
        logits=lambda _, lasts: dict.fromkeys(range(len(lasts)), logits),
    )


@pytest.mark.parametrize(("own", "others"), [(nan, 7), (1.0, -1)])
def test_logits_that_are_not_numbers_are_an_error_on_every_rank(own: float, others: int) -> None:
    """`others`: token of the second rank, as this rank receives it."""
    engine = first_of_two_ranks(lambda ids: ids + torch.tensor([0, others]), torch.full((50,), own))
    with pytest.raises(FloatingPointError, match="no token can be drawn"):
        generate_with(engine, [[1], [2]], 5, 8, Sampling(50, seed=3), at_once=2)


def test_a_rank_draws_only_its_own_texts_and_sums_only_the_tokens_ids() -> None:
    vocabulary, summed = 50, list[torch.Tensor]()

    def add_other_ranks(ids: torch.Tensor) -> torch.Tensor:
        """Add the second rank's token, 7, of the second text."""
        summed.append(ids.clone())
        return ids + torch.tensor([0, 7])

    engine = first_of_two_ranks(add_other_ranks, torch.arange(float(vocabulary)) / 9)
    first, second = generate_with(engine, [[1], [2]], 5, 8, Sampling(vocabulary, seed=3), at_once=2)
    assert [ids.shape for ids in summed] == [(2,)] * 5
    assert [ids.tolist() for ids in summed] == [[token, 0] for token in first]
    assert second == [7] * 5


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.5}, {"temperature": 0}, {"vocabulary": 20}])
def test_a_skipped_draw_advances_the_generator_like_a_draw(settings: dict[str, Any]) -> None:
    sampling = Sampling(**{"vocabulary": 30} | settings)
    logits = torch.linspace(0, 3, 30)
    drawing, skipping = (torch.Generator().manual_seed(4) for _ in range(2))
    for number in range(6):
        draw(logits.roll(number), sampling, drawing)
        skip(logits, sampling, skipping)
    assert torch.equal(drawing.get_state(), skipping.get_state())


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 9))
def test_every_sequence_counts_on_one_rank_and_all_ranks_run_equally_often(count: int, data: int, at_once: int) -> None:
    ranks = [list(assign_sequences(count, data, rank, at_once)) for rank in range(data)]
    counted = [sequence.index for runs in ranks for run in runs for sequence in run if sequence.counts]
    assert sorted(counted) == list(range(count))
    assert all(0 <= sequence.index < count for runs in ranks for run in runs for sequence in run)
    assert len({tuple(map(len, runs)) for runs in ranks}) == 1, "as many in as many runs"
    assert max(map(len, ranks[0])) <= at_once
