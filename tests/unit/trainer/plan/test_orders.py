"""The orders leave the idle shares of time that the literature gives, and layered order moves no more data with more
micro-batches."""

import random
from itertools import product

import pytest
from pseudoreal_trainer.estimate.time.costs import UnitTime
from pseudoreal_trainer.estimate.time.predict import idle_share
from pseudoreal_trainer.estimate.time.timeline import timeline
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.records import Fetch, Plan, Reduce, Send

from tests.unit.trainer.plan.support.cases import everywhere, make_layout

_GRID = list(product(range(2, 9), range(1, 7), range(1, 17)))
"""Pipeline ranks, layers on each, micro-batches."""


def overhead(layout: Layout, backward: float) -> float:
    """Return the step time as a multiple of the time of the passes alone, minus one."""
    ideal = layout.layers / layout.pipeline * layout.micro_batches * (1 + backward)
    return timeline(layout, step_plan(layout), UnitTime(layout, backward)).seconds / ideal - 1


@pytest.mark.parametrize("part", range(4))
def test_modular_pipeline_idle_time_matches_its_formula_in_400_configurations(part: int) -> None:
    """Formula of method.md 2.4: [(P-1) + (v-1) max(0, P-n)] / (v n)."""
    sample = random.Random(2106).sample(_GRID, 400)[part::4]
    for p, v, n in sample:
        backward = 2.0 + n % 2
        layout = make_layout(p * v, p, n)
        assert overhead(layout, backward) == pytest.approx(((p - 1) + (v - 1) * max(0, p - n)) / (v * n)), (p, v, n)


@pytest.mark.parametrize("order", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("p", "v", "n"), random.Random(1811).sample(_GRID, 15))
def test_idle_time_of_contiguous_pipelines_matches_its_formula(order: str, p: int, v: int, n: int) -> None:
    assert overhead(make_layout(p * v, p, n, order=order), 2.0) == pytest.approx((p - 1) / n)


@pytest.mark.parametrize(("p", "v", "rounds"), [(2, 1, 1), (2, 3, 4), (3, 4, 2), (4, 2, 2), (4, 6, 1), (8, 2, 2)])
def test_idle_time_of_an_interleaved_pipeline_matches_its_formula(p: int, v: int, rounds: int) -> None:
    layout = make_layout(p * v, p, p * rounds, order="Interleaved")
    assert overhead(layout, 2.0) == pytest.approx((p - 1) / (v * layout.micro_batches))


def test_idle_share_is_idle_time_divided_by_step_time() -> None:
    layout = make_layout(8, 4, 8)
    extra = overhead(layout, 3.0)
    line = timeline(layout, step_plan(layout), UnitTime(layout, 3.0))
    assert extra > 0.1
    assert idle_share(line, 4) == pytest.approx(extra / (1 + extra))


@pytest.mark.parametrize(("p", "layers", "n"), [(2, 4, 1), (2, 7, 3), (4, 8, 5), (3, 3, 2)])
def test_modular_pipeline_sends_each_boundary_twice_for_each_micro_batch(p: int, layers: int, n: int) -> None:
    sends = [step for steps in step_plan(make_layout(layers, p, n)) for step in steps if isinstance(step, Send)]
    assert len(sends) == 2 * (layers - 1) * n


def counts(plan: Plan, kind: type[Fetch] | type[Reduce]) -> list[int]:
    """Return the number of records of a kind, for each rank and unit."""
    return [
        sum(isinstance(step, kind) and step.unit == unit for step in steps)
        for steps in plan
        for unit in {step.unit for step in steps if isinstance(step, kind)}
    ]


@pytest.mark.parametrize("n", [1, 2, 16])
@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize("p", [1, 2])
def test_layered_fetches_at_most_twice_and_reduces_once(p: int, window: int, n: int) -> None:
    layers = 8
    plan = step_plan(make_layout(layers, p, n, homes=everywhere("Host", layers), window=window))
    units = [layers // p + sum(end == rank for end in (0, p - 1)) for rank in range(p)]
    assert max(counts(plan, Fetch)) <= 2
    assert sum(counts(plan, Fetch)) == sum(2 * local - window for local in units)
    assert counts(plan, Reduce) == [1] * sum(units)


def test_depth_first_order_fetches_for_each_micro_batch() -> None:
    """Layered order saves these fetches."""
    plan = step_plan(make_layout(8, 1, 16, order="GPipe", homes=everywhere("Host", 8)))
    assert max(counts(plan, Fetch)) == 32
    assert counts(plan, Reduce) == [1] * 10
