"""Effects of records against the plans that contain them; bytes per link against formulas per parameter or token."""

import ast
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.spec.phase import Keep
from pseudoreal_trainer.plan.effects import TRAFFIC, Traffic, effects_of, result, traffic_bytes
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.records import Read, Record, Update
from pseudoreal_trainer.plan.sizes import Sizes

from tests.unit.trainer.plan.support.cases import everywhere, make_layout, make_sizes

L = 8


def of_step(layout: Layout, sizes: Sizes) -> Counter[Traffic]:
    """Return the bytes that all pipeline ranks move in a step."""
    total: Counter[Traffic] = Counter()
    for steps in step_plan(layout):
        total.update(traffic_bytes(layout, sizes, steps))
    return total


@pytest.mark.parametrize("home", ["Device", "Host", "Disk"])
@pytest.mark.parametrize("sharding", ["None", "Full"])
@pytest.mark.parametrize("stash", [False, True])
def test_traffic_does_not_grow_with_micro_batches(home: Any, sharding: str, stash: bool) -> None:
    """Both layouts have the same number of sequences per step."""
    few, many = (
        of_step(
            make_layout(L, 2, n, data=2, sharding=sharding, homes=everywhere(home, L), stash=stash),
            make_sizes(L, micro_batch=64 // n),
        )
        for n in (2, 16)
    )
    assert few == many
    assert few["pipeline"] > 0
    assert (few["h2d"] > 0) == (home != "Device" or stash)


@pytest.mark.parametrize(("compute", "c"), [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_bytes_moved_for_units_on_the_host(compute: str, c: int, window: int) -> None:
    """Weights take 2 (2 N - k) / N bytes per parameter, for N units and a window of k; gradients move once."""
    sizes = make_sizes(L, compute=compute)
    total = of_step(make_layout(L, 1, 3, homes=everywhere("Host", L), window=window), sizes)
    weights = [unit.numel for unit in sizes.units]
    once = sum(weights[-window:])
    assert total["h2d"] == c * (2 * sum(weights) - once)
    assert total["d2h"] == 4 * sum(weights)
    assert not {traffic for traffic in TRAFFIC if total[traffic]} - {"h2d", "d2h"}


@pytest.mark.parametrize("clipping", ["Global", "PerUnit"])
@pytest.mark.parametrize(("compute", "c"), [("bfloat16", 2), ("float32", 4)])
def test_bytes_moved_for_units_on_disk(compute: str, c: int, clipping: str) -> None:
    """Per parameter: 12 bytes read and 12 written by the update; the gradient once each way if it waits for the norm;
    and a copy of the weights to fetch from, if the compute dtype differs."""
    sizes = make_sizes(L, compute=compute)
    total = of_step(make_layout(L, 1, 2, homes=everywhere("Disk", L), clipping=clipping), sizes)
    weights = [unit.numel for unit in sizes.units]
    gradient = 4 if clipping == "Global" else 0
    fetched = c * (2 * sum(weights) - sum(weights[-2:]))
    assert total["disk_read"] == (12 + gradient) * sum(weights) + fetched
    assert total["disk_write"] == (12 + gradient + (2 if c == 2 else 0)) * sum(weights)
    assert total["h2d"] == fetched


@pytest.mark.parametrize("d", [2, 4])
def test_collectives_of_each_sharding(d: int) -> None:
    """Each rank sends (D - 1) / D of a gathered or scattered vector, and twice as much of an all-reduced one."""
    sizes = make_sizes(L, compute="bfloat16")
    whole = sum(unit.shard_length(d) * d for unit in sizes.units)
    blocks_twice = 2 * whole - sum(unit.shard_length(d) * d for unit in sizes.units[-2:])
    part = (d - 1) / d
    expected = {
        "None": 2 * 4 * sum(unit.numel for unit in sizes.units),
        "Optimizer": (4 + 2) * whole,
        "Gradients": (4 + 2) * whole,
        "Full": 4 * whole + 2 * blocks_twice,
    }
    for sharding, size in expected.items():
        total = of_step(make_layout(L, 1, 2, data=d, sharding=sharding), sizes)
        assert total["collective"] == pytest.approx(part * size, abs=L + 2), sharding


@pytest.mark.parametrize(("r", "s"), [(2, 2), (4, 2), (2, 4), (3, 1)])
def test_collectives_of_replicas(r: int, s: int) -> None:
    """Float32 sums are reduced over the shards, p (S - 1) / S, and their shards over the replicas, (p / S) (R - 1) / R;
    weights take the reverse way."""
    sizes = make_sizes(L, compute="bfloat16")
    whole = sum(unit.shard_length(r * s) * r * s for unit in sizes.units)
    fetched = 2 * whole - sum(unit.shard_length(r * s) * r * s for unit in sizes.units[-2:])
    for sharding, elements in (("Optimizer", whole), ("Gradients", whole), ("Full", fetched)):
        total = of_step(make_layout(L, 1, 2, data=r * s, replicas=r, sharding=sharding), sizes)
        moved = 4 * whole + 2 * elements
        assert total["collective"] == pytest.approx(moved * (s - 1) / s), sharding
        assert total["replicas"] == pytest.approx(moved / s * (r - 1) / r), sharding


def test_pipeline_messages() -> None:
    """4 bytes per hidden feature and token, for the activation and for its gradient, at each of L - 1 boundaries."""
    sizes = make_sizes(L, micro_batch=6)
    total = of_step(make_layout(L, 4, 5), sizes)
    tokens = 5 * 6 * sizes.model.sequence_length
    assert total["pipeline"] == 2 * (L - 1) * tokens * sizes.model.hidden_size * 4


@pytest.mark.parametrize("sharding", ["None", "Optimizer", "Gradients", "Full"])
@pytest.mark.parametrize("home", ["Device", "Host", "Disk"])
@pytest.mark.parametrize(("p", "d"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_a_block_of_several_pipeline_ranks_is_gathered_and_summed_over_all_of_them_once(
    p: int, d: int, home: Any, sharding: str
) -> None:
    """Each of N = P D ranks sends (N - 1) / N of the block's weights and of its gradient, and updates and
    moves 1 / N."""
    sizes = make_sizes(L, 1, compute="bfloat16")
    homes = ("Device", home, "Device")
    layout = make_layout(L, p, 2, data=d, sharding=sharding, layer_blocks=(0,) * L, homes=homes)
    whole, part = sizes.units[1].shard_length(p * d) * p * d, sizes.units[1].shard_length(p * d)
    for rank, records in enumerate(step_plan(layout)):
        of_block = [record for record in records if getattr(record, "unit", None) == 1]
        moved = traffic_bytes(layout, sizes, tuple(of_block))
        assert moved["collective"] == (4 + 2) * (whole - part), rank
        assert (moved["h2d"], moved["d2h"]) == ((0, 0) if home == "Device" else (2 * part, 4 * part))
        on_disk = (2 + 12 + 4) * part, (4 + 12 + 2) * part
        assert (moved["disk_read"], moved["disk_write"]) == (on_disk if home == "Disk" else (0, 0))


def test_a_block_of_one_pipeline_rank_needs_no_sum() -> None:
    sizes = make_sizes(L, 2)
    assert of_step(make_layout(L, 2, 2, layer_blocks=(0, 1) * 4), sizes)["collective"] == 0
    assert of_step(make_layout(L, 2, 2, layer_blocks=(0, 0, 1, 1) * 2), sizes)["collective"] > 0


@pytest.mark.parametrize("keep", ["All", "Products", "Inputs"])
@pytest.mark.parametrize("home", ["Device", "Disk"])
@pytest.mark.parametrize(("order", "expert_groups"), [("Layered", 1), ("Layered", 2), ("1F1B", 1)])
def test_every_record_that_an_effect_waits_for_is_earlier_in_the_plan(
    order: str, home: Any, expert_groups: int, keep: Keep
) -> None:
    layout = make_layout(
        4,
        2,
        3,
        data=4,
        expert_ranks=2,
        expert_groups=expert_groups,
        layer_experts=(None, 0, 1, 0),
        order=order,
        sharding="Full",
        balances_steps=order == "Layered",
        keep=keep,
        stash=keep == "Inputs",
    )
    layout = replace(layout, homes=(home,) * layout.units)
    for records in step_plan(layout):
        executed: set[Record] = set()
        accumulating: set[int] = set()
        for record in records:
            effects = effects_of(layout, record)
            # An Update is from the step before, and only units on disk are read.
            awaited = {earlier for earlier in effects.after if not isinstance(earlier, Update | Read)}
            assert awaited <= executed, record
            accumulating |= set(effects.accumulates)
            accumulating -= set(effects.frees)
            executed.add(result(record))
        assert not accumulating


@pytest.mark.parametrize("module", ["check", "memory.activations"])
def test_checker_and_activation_bytes_are_independent_of_the_effects(module: str) -> None:
    """`activations` may build a plan, whose bytes it then counts by rules of its own."""
    source = Path(import_module(f"pseudoreal_trainer.plan.{module}").__file__ or "").read_text()
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert "pseudoreal_trainer.plan.effects" not in imported
    assert module != "check" or "pseudoreal_trainer.plan.lower" not in imported
