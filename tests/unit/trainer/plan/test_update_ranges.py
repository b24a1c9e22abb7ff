"""Ranges that are updated alike, against the update of each tensor by itself."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.optimizer import Optimizer
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.plan.units import Unit, units_of
from pseudoreal_trainer.plan.update_ranges import UpdateRange, cut, update_ranges, without

from tests.support.tensor_groups import PATTERNS, figures_of

MODELS: list[dict[str, Any]] = [
    {},
    {"embeddings": "Tied", "attention": {"heads": 2, "bias": "All", "queryKeyNorm": "PerHead"}},
    {
        "feedForward": {"size": 12, "bias": "All"},
        "experts": {"type": "TopK", "count": 3, "topK": {"perToken": 2, "sharedExperts": 1}, "denseLayers": [1]},
    },
]


def _units(changes: dict[str, Any]) -> tuple[Unit, ...]:
    plain = {"attention": {"heads": 2}, "feedForward": {"size": 12}}
    sizes = {"layers": 2, "hiddenSize": 8, "sequenceLength": 4}
    return units_of(Model.model_validate(sizes | plain | changes), Sharing(blocks=2))


UNITS = [_units(changes) for changes in MODELS]


def _optimizer(multipliers: dict[str, tuple[str, str]], *excluded: Any) -> Optimizer:
    listed = [{"tensors": n, "learningRate": rate, "weightDecay": decay} for n, (rate, decay) in multipliers.items()]
    return Optimizer.model_validate({"multipliers": listed, "decayExclusions": excluded})


def test_each_matrix_of_muon_is_a_range_and_comes_first() -> None:
    """The oracle reshapes the flat vector: row r of a matrix is where the tensor has it."""
    spec = Optimizer.model_validate(
        {"algorithm": "Muon", "multipliers": [{"tensors": "Attention", "learningRate": "2", "weightDecay": "0.5"}]}
    )
    for unit in (unit for units in UNITS for unit in units):
        ranges, expected, begin = update_ranges(unit, spec), list[tuple[int, int, int, float, float]](), 0
        for parameter in unit.parameters:
            if re.search(
                PATTERNS["Attention"] + "|" + PATTERNS["FeedForward"] + "|" + PATTERNS["Experts"], parameter.name
            ):
                rows, columns = parameter.shape[-2:]
                for first in range(begin, begin + parameter.numel, rows * columns):
                    expected.append((first, first + rows * columns, columns, *figures_of(parameter.name, spec)))
            begin += parameter.numel
        found = [(one.begin, one.end, one.columns, one.rate, one.decay) for one in ranges if one.is_of_muon]
        assert found == expected
        of_muon = len(expected)
        assert not any(one.is_of_muon for one in ranges[of_muon:])
        assert unit.hidden == sum(end - first for first, end, *_ in expected)
        assert [one.begin for one in ranges] == [0, *(one.end for one in ranges[:-1])]


def _by_element(ranges: tuple[UpdateRange, ...]) -> list[tuple[float, float]]:
    assert [one.begin for one in ranges] == [0, *(one.end for one in ranges[:-1])]
    return [(one.rate, one.decay) for one in ranges for _ in range(one.begin, one.end)]


numbers = st.sampled_from(["0", "0.5", "1", "2"])
multipliers = st.dictionaries(st.sampled_from([*PATTERNS]), st.tuples(numbers, numbers))


@given(st.sampled_from(UNITS), multipliers, st.sets(st.sampled_from(["Embedding", "Head"])))
def test_update_range_has_learning_rate_and_decay_of_its_tensor(
    units: tuple[Unit, ...], chosen: dict[str, tuple[str, str]], excluded: set[str]
) -> None:
    spec = _optimizer(chosen, *sorted(excluded))
    for unit in units:
        expected = [figures for p in unit.parameters for figures in [figures_of(p.name, spec)] * p.numel]
        assert _by_element(update_ranges(unit, spec)) == expected


@pytest.mark.parametrize("units", UNITS, ids=map(str, MODELS))
def test_each_tensor_is_in_one_group(units: tuple[Unit, ...]) -> None:
    for unit in units:
        for parameter in unit.parameters:
            assert sum(bool(re.search(pattern, parameter.name)) for pattern in PATTERNS.values()) == 1


def test_without_multipliers_there_are_matrices_and_others() -> None:
    """The decay's value does not matter: the ends of ranges decide which elements are rounded as the remainder of a
    vector."""
    for decay in ("0.1", "0"):
        for unit in UNITS[1]:
            ranges = update_ranges(unit, Optimizer(weight_decay=decay))
            matrices = sum(parameter.numel for parameter in unit.parameters if len(parameter.shape) > 1)
            assert {(one.begin, one.end) for one in ranges} == {(0, matrices), (matrices, unit.numel)} - {
                (unit.numel, unit.numel)
            }


BALANCED = _units({"experts": {"type": "TopK", "count": 5, "topK": {"perToken": 2, "biasUpdateRate": "0.1"}}})[1]


@given(st.integers(1, 80), st.integers(1, 100), multipliers)
def test_update_ranges_of_chunks_join_to_those_of_the_whole_shard(
    ranks: int, chunk: int, chosen: dict[str, tuple[str, str]]
) -> None:
    """With many ranks, the last ones have only padding. After a balancing bias, no range updates padding."""
    whole = update_ranges(BALANCED, _optimizer(chosen))
    assert whole[-1] == UpdateRange(BALANCED.trained, BALANCED.numel, is_balancing=True)
    found = []
    for rank in range(ranks):
        shard = BALANCED.shard(rank, ranks)
        ranges = cut(whole, shard.start, shard.stop)
        for begin in range(0, len(shard), chunk):
            parts = cut(ranges, begin, min(begin + chunk, len(shard)))
            first = shard.start + begin
            found += [(first + i, replace(one, begin=0, end=0)) for one in parts for i in range(one.begin, one.end)]
    assert found == [(i, replace(one, begin=0, end=0)) for one in whole for i in range(one.begin, one.end)]


@given(st.data(), multipliers)
def test_cut_ranges_equal_the_whole_ranges_there(data: st.DataObject, chosen: dict[str, tuple[str, str]]) -> None:
    """Padding after the end belongs to the last range."""
    ranges = update_ranges(UNITS[2][1], _optimizer(chosen))
    whole = _by_element(ranges)
    begin = data.draw(st.integers(0, len(whole) + 5))
    end = data.draw(st.integers(begin + 1, len(whole) + 40))
    padded = whole + whole[-1:] * 40
    assert _by_element(cut(ranges, begin, end)) == padded[begin:end]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sets(st.integers(0, 40)), st.integers(0, 9))
def test_elements_in_gaps_are_in_no_range(lengths: list[int], idle: set[int], begin: int) -> None:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    ranges = [UpdateRange(end - n, end, rate=float(i)) for i, (n, end) in enumerate(zip(lengths, ends, strict=True))]
    left = without(ranges, [range(one, one + 1) for one in sorted(idle)], begin)
    expected = [(e, one.rate) for one in ranges for e in range(one.begin, one.end) if e + begin not in idle]
    assert [(e, one.rate) for one in left for e in range(one.begin, one.end)] == expected
