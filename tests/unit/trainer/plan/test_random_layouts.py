"""The plan of any layout passes the checker, and its steps can follow each other."""

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_api.resolved.resolve import check_interleaved
from pseudoreal_api.spec.phase import Home, Keep
from pseudoreal_trainer.estimate.time.costs import UnitTime
from pseudoreal_trainer.estimate.time.timeline import timeline
from pseudoreal_trainer.plan.check import check_plan
from pseudoreal_trainer.plan.effects import effects_of
from pseudoreal_trainer.plan.layout import POOLS, Layout, Pool
from pseudoreal_trainer.plan.lower import measuring_plan, step_plan
from pseudoreal_trainer.plan.orders import gradient_buffers

from tests.support.depth import DEPTH


@st.composite
def _uses(draw: st.DrawFn, groups: list[int]) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """Return the blocks and the experts of layers. Layers of a group share their blocks and so their experts, or only
    their experts; or there are no experts."""
    layers, has_experts = range(len(groups)), draw(st.booleans())
    if not has_experts:
        return tuple(groups), ()
    if draw(st.booleans()):
        dense = draw(st.sets(st.sampled_from(groups)))
        return tuple(groups), tuple(None if group in dense else group for group in groups)
    dense = draw(st.sets(st.sampled_from(layers)))
    first = {group: next((i for i in layers if groups[i] == group and i not in dense), None) for group in groups}
    return tuple(layers), tuple(None if layer in dense else first[groups[layer]] for layer in layers)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    pipeline = draw(st.integers(1, 4))
    blocks = draw(st.integers(1, 4))
    layers = draw(st.integers(pipeline, 9))
    layer_blocks, layer_experts = draw(_uses(draw(st.permutations([layer % blocks for layer in range(layers)]))))
    keep: Keep = draw(st.sampled_from(["Inputs", "Products", "All"]))
    data = draw(st.integers(1, 4))
    layout = Layout(
        layer_blocks=layer_blocks,
        layer_experts=layer_experts,
        pipeline=pipeline,
        data=data,
        expert_ranks=draw(st.sampled_from([ranks for ranks in range(1, data + 1) if data % ranks == 0])),
        micro_batches=draw(st.integers(1, 5)),
        order=draw(st.sampled_from(["Layered", "GPipe", "1F1B", "Interleaved"])),
        sharding=draw(st.sampled_from(["None", "Optimizer", "Gradients", "Full"])),
        window=draw(st.integers(1, 4)),
        keep=keep,
        stash=keep == "Inputs" and draw(st.booleans()),
        clipping=draw(st.sampled_from(["Global", "PerUnit", "None"])),
        ends_are_one=draw(st.booleans()),
    )
    if layout.order == "Layered" and layout.clipping != "PerUnit":
        layout = replace(layout, expert_groups=draw(st.integers(1, 3)))
    homes: st.SearchStrategy[Home] = st.sampled_from(["Device", "Host", "Disk"])
    layout = replace(layout, homes=tuple(draw(homes) for _ in range(layout.units)))
    return layout if _is_possible(layout) else replace(layout, order="1F1B")


def _is_possible(layout: Layout) -> bool:
    try:
        check_interleaved(layout.layers, layout.pipeline, layout.micro_batches)
    except ValueError:
        return layout.order != "Interleaved"
    return True


@settings(max_examples=DEPTH.of(300, 10_000))
@given(layouts())
def test_plan_of_any_layout_passes_the_checker_and_ends(layout: Layout) -> None:
    plan = step_plan(layout)
    check_plan(layout, plan)
    check_plan(layout, measuring_plan(layout))
    line = timeline(layout, plan, UnitTime(layout), steps=2)
    passes = layout.micro_batches * (1 + UnitTime(layout).backward)
    most = max(sum(0 < p < layout.head for p in layout.positions(rank)) for rank in range(layout.pipeline))
    seconds = pytest.approx(line.seconds)
    assert most * passes <= line.seconds <= layout.layers * passes or seconds in (most * passes, layout.layers * passes)


@settings(max_examples=DEPTH.of(100, 10_000))
@given(layouts())
def test_units_share_the_buffers_that_they_would_take_from_a_queue(layout: Layout) -> None:
    """The oracle takes the gradient buffers of a plan from a queue: each gradient takes the buffer that has been free
    the longest, and a reduction returns the buffer to the end of the queue."""
    for rank, records in enumerate(step_plan(layout)):
        buffers = gradient_buffers(layout, rank)
        queues = {pool: [units for units in buffers if layout.pool_of(units[0]) == pool] for pool in POOLS}
        users: dict[Pool, list[list[int]]] = {pool: [[] for _ in queue] for pool, queue in queues.items()}
        free = {pool: deque(range(len(queue))) for pool, queue in queues.items()}
        taken: dict[int, int] = {}
        for record in records:
            effects = effects_of(layout, record)
            for unit in effects.accumulates:
                if unit not in taken:
                    taken[unit] = free[pool := layout.pool_of(unit)].popleft()
                    users[pool][taken[unit]].append(unit)
            for unit in effects.frees:
                if unit in taken:
                    free[layout.pool_of(unit)].append(taken[unit])
        for pool in POOLS:
            assert sorted(queues[pool]) == sorted(users[pool])
