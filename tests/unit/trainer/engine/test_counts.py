"""Operations of the engine, counted in its own trace: fetches, reductions, messages, bytes."""

from collections import Counter
from typing import Any

import pytest
from pseudoreal_trainer.plan.layout import POOLS, Layout, Pool

from tests.unit.trainer.engine.support.cases import SEQUENCES_OF_A_MICRO_BATCH, STEPS, Case
from tests.unit.trainer.engine.support.running import Result, want

FETCHING = [
    *(Case(data=2, sharding="Full", micro_batches=n, window=k) for n in (1, 2, 8) for k in (1, 2, 3)),
    *(Case(homes="hD", micro_batches=n, window=k) for n in (1, 2, 8) for k in (1, 4)),
    Case(pipeline=2, data=2, sharding="Full", homes="hD", window=2),
]
OTHER_ORDERS = [Case(homes="D", order=order, micro_batches=4, window=2) for order in ("GPipe", "1F1B", "Interleaved")]
FEW_AND_MANY = [
    tuple(Case(data=2, sharding=sharding, homes=homes, clipping="Global", micro_batches=n) for n in (2, 16))
    for sharding, homes in (("Full", "dhD"), ("Full", "d"), ("None", "d"), ("Optimizer", "D"), ("Gradients", "h"))
]
FEW_AND_MANY.append(tuple(Case(pipeline=2, blocks=1, homes="D", micro_batches=n) for n in (2, 16)))
PIPELINES = [
    *(Case(pipeline=p, micro_batches=n, order="Layered") for p in (2, 4) for n in (2, 8)),
    Case(pipeline=2, micro_batches=2, order="1F1B"),
    Case(pipeline=2, data=2, micro_batches=2),
]
COMMON = [
    (Case(pipeline=2, blocks=1), {1: 1}),
    (Case(pipeline=2, blocks=2, pattern="Segment"), {1: 1, 2: 1}),
    (Case(pipeline=2, layers=5, blocks=1, homes="D", clipping="PerUnit"), {1: 1}),
    (Case(pipeline=2, blocks=2, pattern="Cycle"), {}),
    (Case(pipeline=2, blocks=4), {}),
]
ALL = [
    *FETCHING,
    *OTHER_ORDERS,
    *(case for pair in FEW_AND_MANY for case in pair),
    *PIPELINES,
    *(case for case, _ in COMMON),
]

Results = dict[Case, list[Result]]
want(ALL, events=True)


def units_in(result: Result, name: str, step: int) -> Counter[int]:
    """Return unit -> number of events with this name in the step."""
    return Counter(e["args"]["unit"] for e in result.events if e["name"] == name and e["args"]["step"] == step)


def moving_units(case: Case, rank: int) -> dict[Pool, list[int]]:
    layout = case.layout
    moving = [unit for unit in layout.local_units(rank // layout.data) if layout.moves(unit)]
    return {pool: [unit for unit in moving if layout.pool_of(unit) == pool] for pool in POOLS}


@pytest.mark.parametrize("case", FETCHING, ids=lambda case: case.name)
def test_a_unit_is_fetched_at_most_twice_per_step_for_any_number_of_micro_batches(
    case: Case, engine_results: Results
) -> None:
    for rank, result in enumerate(engine_results[case]):
        moving = moving_units(case, rank)
        for step in range(STEPS):
            fetches = units_in(result, "Fetch", step)
            assert set(fetches) == {unit for units in moving.values() for unit in units}
            assert max(fetches.values()) <= 2
            for units in moving.values():
                assert sum(fetches[unit] for unit in units) == 2 * len(units) - min(case.window, len(units))
            assert fetches == units_in(result, "Drop", step)


@pytest.mark.parametrize("case", [*FETCHING, *PIPELINES], ids=lambda case: case.name)
def test_a_gradient_is_reduced_once_per_step_for_any_number_of_micro_batches(
    case: Case, engine_results: Results
) -> None:
    for rank, result in enumerate(engine_results[case]):
        local = case.layout.local_units(rank // case.data)
        for step in range(STEPS):
            assert units_in(result, "Reduce", step) == Counter(local)
            assert units_in(result, "Update", step) == Counter(local)


@pytest.mark.parametrize("case", [*FETCHING, *OTHER_ORDERS], ids=lambda case: case.name)
def test_the_window_limits_the_number_of_working_copies(case: Case, engine_results: Results) -> None:
    for rank, result in enumerate(engine_results[case]):
        for pool, units in moving_units(case, rank).items():
            most = most_resident(result, case.layout, pool)
            assert most == min(case.window, len(units)), "full, and never more than that"


def most_resident(result: Result, layout: Layout, pool: Pool) -> int:
    resident: set[int] = set()
    most = 0
    for event in sorted(result.events, key=lambda event: event["ts"]):
        unit = event["args"].get("unit")
        if unit is None or layout.pool_of(unit) != pool:
            continue
        if event["name"] == "Fetch" and layout.moves(unit):
            assert unit not in resident, "it is fetched while it is here"
            resident.add(unit)
            most = max(most, len(resident))
        elif event["name"] == "Drop":
            resident.remove(unit)
    assert not resident
    return most


@pytest.mark.parametrize(("few", "many"), FEW_AND_MANY, ids=lambda case: case.name)
def test_bytes_besides_pipeline_messages_do_not_grow_with_micro_batches(
    few: Case, many: Case, engine_results: Results
) -> None:
    for of_few, of_many in zip(engine_results[few], engine_results[many], strict=True):
        links = [[_without_pipeline(moved) for moved in result.moved] for result in (of_few, of_many)]
        assert links[0] == links[1]
        assert sum(links[0][-1].values()) > 0


def _without_pipeline(moved: dict[str, int]) -> dict[str, int]:
    return {link: size for link, size in moved.items() if link != "pipeline"}


@pytest.mark.parametrize("case", PIPELINES, ids=lambda case: case.name)
def test_pipeline_messages_have_the_planned_number_and_bytes(case: Case, engine_results: Results) -> None:
    """One activation and one gradient per micro-batch at each boundary between ranks: every boundary between layers if
    layers are placed round-robin, one boundary between neighbouring ranks if each rank has adjacent layers."""
    boundaries = case.layers - 1 if case.order == "Layered" else case.pipeline - 1
    expected = 2 * boundaries * case.micro_batches
    sequences = SEQUENCES_OF_A_MICRO_BATCH // case.data
    message = sequences * case.model.sequence_length * case.model.hidden_size * 8
    for data_rank in range(case.data):
        row = engine_results[case][data_rank :: case.data]
        for step in range(STEPS):
            for name in ("Send", "Receive"):
                seen = [_message(e) for result in row for e in result.events if _is(e, name, step)]
                assert len(seen) == len(set(seen)) == expected
            assert sum(result.moved[step]["pipeline"] for result in row) == expected * message


def _is(event: dict[str, Any], name: str, step: int) -> bool:
    return bool(event["name"] == name and event["args"]["step"] == step)


def _message(event: dict[str, Any]) -> tuple[str, int, int]:
    args = event["args"]
    return args["flow"], args["position"], args["micro_batch"]


@pytest.mark.parametrize(("case", "expected"), COMMON, ids=lambda value: getattr(value, "name", ""))
def test_a_cross_stage_block_is_gathered_and_reduced_once_by_all_its_ranks(
    case: Case, expected: dict[int, int], engine_results: Results
) -> None:
    layout = case.layout
    for result in engine_results[case]:
        for step in range(STEPS):
            for name in ("Fetch", "Reduce", "Update"):
                found = units_in(result, name, step)
                assert {unit: count for unit, count in found.items() if layout.is_common(unit)} == expected
