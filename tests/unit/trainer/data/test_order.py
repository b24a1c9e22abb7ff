from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_trainer.data.order import PhaseSamples, check_epochs, continue_phase, phase_samples, project_phases
from pseudoreal_trainer.errors import InvalidJobError

NAMES = ("web", "code", "books")
mixtures = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9), min_size=1).filter(lambda w: any(w.values()))
phases = st.lists(st.tuples(mixtures, st.integers(0, 60)), min_size=1, max_size=4)
"""Weights of each phase, and the samples that it took in the end."""


def _stretches(phases: list[tuple[dict[str, int], int]]) -> list[tuple[PhaseSamples, int]]:
    """Return each phase with the cursor at which it ended."""
    found: list[tuple[PhaseSamples, int]] = []
    begin, consumed = 0, dict[str, int]()
    for weights, samples in phases:
        found.append((phase_samples(begin, weights, consumed), begin + samples))
        begin += samples
        consumed = found[-1][0].consumed(begin)
    return found


def _samples(part: PhaseSamples, first: int, end: int) -> list[tuple[str, int]]:
    sources, numbers = part.locate(np.arange(first, end))
    return [(part.names[source], number) for source, number in zip(sources.tolist(), numbers.tolist(), strict=True)]


@given(phases)
def test_phases_neither_repeat_nor_skip(phases: list[tuple[dict[str, int], int]]) -> None:
    """Including phases that end early, anywhere in a period, and sources that pause for a phase."""
    taken = Counter[str]()
    for part, end in _stretches(phases):
        for cursor, (name, number) in enumerate(_samples(part, part.begin, end), start=part.begin):
            assert number == taken[name]
            taken[name] += 1
            assert +Counter(part.consumed(cursor + 1)) == taken
    assert taken.total() == sum(samples for _, samples in phases)


@given(phases, st.data())
def test_a_checkpoint_anywhere_says_enough_to_go_on(
    phases: list[tuple[dict[str, int], int]], data: st.DataObject
) -> None:
    part, end = _stretches(phases)[-1]
    at = data.draw(st.integers(part.begin, end))
    again = continue_phase(
        at, part.begin, dict(zip(part.names, phases[-1][0].values(), strict=True)), part.consumed(at)
    )
    assert _samples(again, at, end + 9) == _samples(part, at, end + 9)


def test_the_horizon_changes_nothing() -> None:
    """Samples before a cursor do not depend on the samples planned after it."""
    short = _stretches([({"web": 3, "code": 1}, 10), ({"books": 1, "web": 1}, 7)])
    longer = _stretches([({"web": 3, "code": 1}, 10), ({"books": 1, "web": 1}, 700)])
    assert _samples(short[1][0], 10, 17) == _samples(longer[1][0], 10, 17)


def test_shares_are_those_of_the_phase() -> None:
    first, second = (part for part, _ in _stretches([({"web": 3, "code": 1}, 8), ({"books": 1, "web": 1}, 8)]))
    assert first.consumed(8) == {"web": 6, "code": 2}
    assert second.consumed(16) == {"web": 10, "code": 2, "books": 4}


@given(phases)
def test_a_plan_is_what_comes_if_nothing_ends_early(phases: list[tuple[dict[str, int], int]]) -> None:
    found = _stretches(phases)
    behind = [(part.begin, weights) for (part, _), (weights, _) in zip(found[1:], phases[1:], strict=True)]
    last, end = found[-1]
    assert project_phases(found[0][0], behind).consumed(end) == last.consumed(end)


def test_too_many_epochs_are_an_error_before_training() -> None:
    last = _stretches([({"web": 3, "code": 1}, 8), ({"books": 1, "web": 1}, 8)])[-1][0]
    samples = {"web": 5, "code": 100, "books": 2}
    check_epochs(last, 16, samples, {"web": 2, "books": 2})
    check_epochs(last, 17, samples, {})
    with pytest.raises(
        InvalidJobError,
        match=r"reads 4 samples of the source books, which has 2: that is 2.00 epochs, and its maxEpochs is 1; give it",
    ):
        check_epochs(last, 16, samples, {"web": 2, "books": 1})
    with pytest.raises(InvalidJobError, match=r"reads 11 samples of the source web, which has 5: that is 2.20 epochs"):
        check_epochs(last, 18, samples, {"web": 2})
