from dataclasses import replace

import pytest
from pseudoreal_api.spec.phase import Home, Offload
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.memory.homes import (
    Bounds,
    activation_peaks,
    budget_bounds,
    budget_violations,
    choose_homes,
    host_state,
    machine_violations,
)
from pseudoreal_trainer.plan.memory.tiers import resident_bytes, unit_state
from pseudoreal_trainer.plan.sizes import Sizes

from tests.unit.trainer.plan.support.cases import make_layout, make_sizes

SIZES = make_sizes(8, hiddenSize=64, feedForward={"size": 256})
ONE_RANK = make_layout(8, 1, 2)
LAYOUTS = [
    ONE_RANK,
    make_layout(8, 2, 4),
    make_layout(8, 2, 4, data=2, sharding="Optimizer"),
    make_layout(8, 1, 4, data=4, sharding="Full"),
    make_layout(8, 4, 2, order="1F1B"),
]


def offload(device: int | None = None, host: int | None = None, **fields: object) -> Offload:
    budget = {name: value for name, value in (("device", device), ("host", host)) if value is not None}
    return Offload.model_validate({"budget": budget} | fields)


def placed(layout: Layout, homes: tuple[Home, ...]) -> Layout:
    return replace(layout, homes=homes)


def homes_of(offload: Offload, layout: Layout, sizes: Sizes) -> tuple[Home, ...]:
    return choose_homes(offload, layout, sizes, activation_peaks(layout, sizes))


def needs(layout: Layout, sizes: Sizes) -> list[int]:
    """Return the device bytes that each rank needs."""
    return [
        resident_bytes(layout, sizes, rank).device + peak.device
        for rank, peak in enumerate(activation_peaks(layout, sizes))
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_unit_moves_if_all_fit(layout: Layout) -> None:
    assert set(homes_of(offload(max(needs(layout, SIZES))), layout, SIZES)) == {"Device"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tenths", range(1, 10))
def test_moved_bytes_exceed_the_missing_bytes_by_less_than_a_unit(layout: Layout, tenths: int) -> None:
    host: Home = "Host"
    everything = placed(layout, (host,) * layout.units)
    least, most = max(needs(everything, SIZES)), max(needs(layout, SIZES))
    bound = least + (most - least) * tenths // 10
    moved = placed(layout, homes_of(offload(bound), layout, SIZES))
    assert max(needs(moved, SIZES)) <= bound
    for rank in range(layout.pipeline):
        local = [unit for unit in layout.local_units(rank) if moved.home(unit) != "Device"]
        state = {unit: unit_state(layout, SIZES, unit).device - unit_state(moved, SIZES, unit).device for unit in local}
        # Bytes that have to move: the need of all units on the device, plus the window for streamed units, minus the
        # bound.
        room = needs(moved, SIZES)[rank] + sum(state.values())
        shortfall = room - bound
        if local:
            assert 0 <= sum(state.values()) - shortfall < max(state.values())


def test_moving_one_unit_less_would_not_fit() -> None:
    bound = max(needs(placed(ONE_RANK, ("Host",) * 10), SIZES)) + 500_000
    homes = homes_of(offload(bound), ONE_RANK, SIZES)
    assert 0 < homes.count("Host") < 10
    for unit, home in enumerate(homes):
        if home == "Host":
            fewer = (*homes[:unit], "Device", *homes[unit + 1 :])
            assert max(needs(placed(ONE_RANK, fewer), SIZES)) > bound


def test_the_blocks_that_are_needed_last_move_first() -> None:
    bound = max(needs(ONE_RANK, SIZES)) - 1
    homes = homes_of(offload(bound - 500_000), ONE_RANK, SIZES)
    moved = [unit for unit, home in enumerate(homes) if home == "Host"]
    assert moved
    assert moved == list(range(9 - len(moved), 9))


def test_units_beyond_the_host_budget_and_no_others_move_to_disk() -> None:
    block = unit_state(placed(ONE_RANK, ("Host",) * 10), SIZES, 1).host
    for bound in (0, block // 2, 2 * block, 5 * block):
        homes = homes_of(offload(host=bound, home="Host"), ONE_RANK, SIZES)
        assert bound - block < host_state(placed(ONE_RANK, homes), SIZES, 0) <= bound
        assert "Device" not in homes


def test_units_with_a_home_of_their_own_stay_there() -> None:
    fixed = [{"unit": "blocks.7", "home": "Device"}, {"unit": "head", "home": "Disk"}]
    homes = homes_of(offload(1, homes=fixed), ONE_RANK, SIZES)
    assert homes == ("Host",) * 8 + ("Device", "Disk")


def test_homes_are_as_specified_without_a_budget() -> None:
    written = Offload.model_validate({"home": "Disk", "homes": [{"unit": "embedding", "home": "Host"}]})
    assert homes_of(written, ONE_RANK, SIZES) == ("Host", *("Disk",) * 9)


def test_budget_violation_names_limit_need_and_difference() -> None:
    budget = offload(100_000).budget
    layout = placed(ONE_RANK, homes_of(offload(100_000), ONE_RANK, SIZES))
    assert set(layout.homes) == {"Host"}
    (sentence,) = budget_violations(layout, SIZES, activation_peaks(layout, SIZES), budget_bounds(budget))
    assert "offload.budget.device is 97.66 KiB, but pipeline rank 0 needs" in sentence
    assert f"({max(needs(layout, SIZES)) - 100_000} bytes) more" in sentence
    assert (
        budget_violations(layout, SIZES, activation_peaks(layout, SIZES), Bounds(max(needs(layout, SIZES)), 10**9))
        == []
    )


def test_a_shared_block_moves_on_all_its_ranks() -> None:
    sizes = make_sizes(8, 2, hiddenSize=64, feedForward={"size": 256})
    layout = make_layout(8, 2, 2, layer_blocks=(0, 0, 1, 1) * 2)
    assert layout.common_layer_units
    bound = max(needs(placed(layout, ("Host",) * 4), sizes))
    moved = placed(layout, homes_of(offload(bound), layout, sizes))
    assert max(needs(moved, sizes)) <= bound


def test_host_buffers_count_against_the_machine_but_not_against_the_budget() -> None:
    layout = placed(ONE_RANK, ("Host",) * 10)
    state, whole = host_state(layout, SIZES, 0), resident_bytes(layout, SIZES, 0).host
    assert whole > state
    assert budget_violations(layout, SIZES, activation_peaks(layout, SIZES), Bounds(host=state)) == []
    (sentence,) = machine_violations(layout, SIZES, activation_peaks(layout, SIZES), Bounds(host=whole - 1))
    assert sentence.startswith("the hardware profile's host_bytes is ")
    assert "(1 bytes) more; let units move to disk" in sentence
    assert machine_violations(layout, SIZES, activation_peaks(layout, SIZES), Bounds(host=whole)) == []
