"""Valid plans with one defect inserted by hand: the check refuses each, and names the fault."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from pseudoreal_trainer.plan import lower
from pseudoreal_trainer.plan.check import PlanError, check_plan
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.lower import measuring_plan, step_plan
from pseudoreal_trainer.plan.orders import compute_order
from pseudoreal_trainer.plan.records import (
    Agree,
    Backward,
    Compute,
    Count,
    Drop,
    Exchange,
    ExpertBackward,
    ExpertForward,
    Fetch,
    Flow,
    Forward,
    Leg,
    Measure,
    Pass,
    Plan,
    RankPlan,
    Read,
    Receive,
    Recompute,
    Record,
    Reduce,
    Route,
    Send,
    Speculate,
    Stash,
    SumChoices,
    Unstash,
    Update,
)

from tests.unit.trainer.plan.support.cases import everywhere, make_layout

OFFLOADED = make_layout(layers=6, data=2, sharding="Full", homes=everywhere("Disk", 6), stash=True)
"""Rank 0: the embedding and layers 1, 3, 5 (units 0, 1, 3, 5); rank 1: layers 2, 4, 6 and the head (2, 4, 6, 7)."""
SPECULATIVE = make_layout(layers=6, data=2, homes=everywhere("Host", 6), speculates=True)
TIED = make_layout(layers=6, layer_blocks=(0, 1, 2, 0, 1, 2))
"""Both ranks use every block."""
MEASURED = replace(TIED, measures=True)
"""Rank 0: layers 1, 3, 5, which use the blocks of layers 4, 6, 2 on rank 1."""
EARLY = replace(OFFLOADED, clipping="PerUnit")
TIED_ENDS = make_layout(layers=8, data=2, ends_are_one=True, sharding="Full", order="GPipe", micro_batches=1)
"""Rank 0: layers 1 to 4; rank 1: layers 5 to 8. Both have unit 0; rank 1 needs the unit for the head only."""
CROWDED = make_layout(
    layers=6, micro_batches=1, order="GPipe", homes=everywhere("Host", 6), window=1, clipping="PerUnit"
)
"""Rank 1 continues only when the head's gradient is reduced and gives its buffer to the gradient of layer 5."""


SPREAD = make_layout(data=2, layer_experts=(0, None, 1, None), expert_ranks=2, sharding="Full")
"""Layers 1 and 3, on rank 0, have experts, which are spread over both of its data ranks."""
SPREAD_AND_CUT = replace(SPREAD, data=4)
KEPT = replace(SPREAD, keep="All")
GROUPED = make_layout(
    pipeline=1, layer_experts=(0, None, 1, None), expert_groups=2, homes=everywhere("Disk", 8), window=1
)
"""Layers 1 and 3 have experts: units 5 and 6, units 7 and 8."""
GROUPED_AND_SHARED = make_layout(
    layers=2, pipeline=1, layer_experts=(0, 0), expert_groups=2, homes=everywhere("Disk", 4), window=1
)
"""Both layers use the experts of units 3 and 4."""


BALANCED = make_layout(layer_experts=(0, None, 1, None), balances_steps=True)
"""Layers 1 and 3, on rank 0, have experts."""
SPREAD_AND_BALANCED = replace(SPREAD, balances_steps=True)


def _measured_last(records: list[Record]) -> None:
    """Move the first measured layer after all others."""
    records.append(records.pop(index_of(records, Measure)))


Edit = Callable[[list[Record]], None]


def index_of(records: Sequence[Record], kind: type[Record], number: int = 0, **fields: object) -> int:
    """Return the index of a record among those of a kind with these fields; `number` selects it."""
    found = [
        index
        for index, record in enumerate(records)
        if isinstance(record, kind) and all(getattr(record, name) == value for name, value in fields.items())
    ]
    return found[number]


def without(kind: type[Record], number: int = 0, **fields: object) -> Edit:
    def edit(records: list[Record]) -> None:
        del records[index_of(records, kind, number, **fields)]

    return edit


def twice(kind: type[Record], number: int = 0, **fields: object) -> Edit:
    def edit(records: list[Record]) -> None:
        index = index_of(records, kind, number, **fields)
        records.insert(index, records[index])

    return edit


def moved(kind: type[Record], number: int, before: type[Record], before_number: int) -> Edit:
    def edit(records: list[Record]) -> None:
        record = records.pop(index_of(records, kind, number))
        records.insert(index_of(records, before, before_number), record)

    return edit


def swapped(kind: type[Record], first: int, second: int, **fields: object) -> Edit:
    def edit(records: list[Record]) -> None:
        a, b = index_of(records, kind, first, **fields), index_of(records, kind, second, **fields)
        records[a], records[b] = records[b], records[a]

    return edit


def swapped_kinds(first: type[Record], second: type[Record], leg: Leg) -> Edit:
    """Return an edit that swaps the first record of one kind with the first of another kind with this leg."""

    def edit(records: list[Record]) -> None:
        a, b = index_of(records, first), index_of(records, second, leg=leg)
        records[a], records[b] = records[b], records[a]

    return edit


def reduced_early(records: list[Record]) -> None:
    """Reduce the gradient of the last layer's experts after its first micro-batch."""
    record = records.pop(index_of(records, Reduce, unit=6))
    records.insert(index_of(records, ExpertBackward) + 1, record)


def reduced_at_once(records: list[Record]) -> None:
    """Reduce the head's gradient, to which another rank contributes, directly after its own last pass."""
    record = records.pop(index_of(records, Reduce, unit=0))
    records.insert(index_of(records, Backward, -1, position=9) + 1, record)


def replaced(kind: type[Record], number: int, new: Record) -> Edit:
    def edit(records: list[Record]) -> None:
        records[index_of(records, kind, number)] = new

    return edit


def replaced_where(kind: type[Record], new: Record, **fields: object) -> Edit:
    def edit(records: list[Record]) -> None:
        records[index_of(records, kind, 0, **fields)] = new

    return edit


def fetched_before_counted(records: list[Record]) -> None:
    """Fetch the first group at the start of the layer's passes."""
    records.insert(index_of(records, Route), records.pop(index_of(records, Fetch, unit=5)))


def read_before_counted(records: list[Record]) -> None:
    records.insert(index_of(records, Route), records.pop(index_of(records, Read, unit=5)))


def kept_for_the_next_layer(records: list[Record]) -> None:
    """Keep the first group's working copy at the point where the next layer needs it for other tokens."""
    for edit in (without(Drop, unit=3), without(Read, unit=3, wanted_by=2), without(Fetch, unit=3, wanted_by=2)):
        edit(records)


def sent_before_the_last_group(records: list[Record]) -> None:
    record = records.pop(index_of(records, Exchange, leg=Leg.DISPATCH_GRADIENT))
    records.insert(index_of(records, ExpertBackward, group=1), record)


def fetched_again(records: list[Record]) -> None:
    """Fetch the first group once more, after its backward passes."""
    index = index_of(records, Drop, -1, unit=5)
    records[index + 1 : index + 1] = [Read(5, 1), Fetch(5, 1), Drop(5)]


def reduced_too_soon(records: list[Record]) -> None:
    record = records.pop(index_of(records, Reduce, unit=7))
    records.insert(index_of(records, ExpertBackward, position=3, group=0, micro_batch=1), record)


def without_micro_batch(records: list[Record]) -> None:
    records[:] = [record for record in records if getattr(record, "micro_batch", None) != 1]


DEFECTS: dict[str, tuple[Layout, int, Edit, str]] = {
    "missing receive": (OFFLOADED, 1, without(Receive), "its input is not here"),
    "missing receive of a gradient": (
        OFFLOADED,
        0,
        without(Receive, -1, flow=Flow.GRADIENT),
        "the gradient of its output is not here",
    ),
    "message received twice": (OFFLOADED, 1, twice(Receive), "it is here already"),
    "missing send": (OFFLOADED, 0, without(Send), "in the order in which they are sent"),
    "messages in another order": (OFFLOADED, 0, swapped(Send, 0, 1), "what it sends does not exist yet"),
    "receives in another order": (OFFLOADED, 1, swapped(Receive, 2, 3), "not here|in the order in which they are sent"),
    "sent to the wrong rank": (
        OFFLOADED,
        0,
        replaced(Send, 0, Send(Flow.ACTIVATION, 2, 0, 0)),
        "rank 0 does not need it",
    ),
    "sent before it exists": (OFFLOADED, 0, moved(Send, 0, Forward, 0), "what it sends does not exist yet"),
    "window exceeded": (OFFLOADED, 0, moved(Fetch, 2, Drop, 0), "3 working copies exceed the window of 2"),
    "missing fetch": (OFFLOADED, 0, without(Fetch, 1), "its unit has no working copy"),
    "fetched twice": (OFFLOADED, 0, twice(Fetch), "its working copy exists already"),
    "fetched although resident": (make_layout(), 0, lambda records: records.insert(0, Fetch(0)), "always exists"),
    "missing read": (OFFLOADED, 0, without(Read), "its weights were not read from disk"),
    "read of a unit that is not on disk": (make_layout(), 0, lambda records: records.insert(0, Read(0)), "is not Disk"),
    "dropped unit used": (OFFLOADED, 0, moved(Drop, 0, Forward, 1), "its unit has no working copy"),
    "forgotten drop": (OFFLOADED, 0, without(Drop, -1), "are never dropped"),
    "resident unit dropped": (
        make_layout(data=2, sharding="Optimizer"),
        0,
        lambda records: records.append(Drop(0)),
        "its working copy must stay",
    ),
    "stash never brought back": (OFFLOADED, 1, without(Unstash), "its input is not here"),
    "stashed twice": (OFFLOADED, 1, twice(Stash), "its input is not here"),
    "forgotten micro-batch": (OFFLOADED, 0, without_micro_batch, "its gradient lacks"),
    "forgotten forward pass": (make_layout(), 0, without(Forward, position=3), "what it sends does not exist yet"),
    "forgotten backward pass": (OFFLOADED, 0, without(Backward, -1), "its gradient lacks"),
    "backward pass twice": (make_layout(), 0, twice(Backward, -1), "it has been already"),
    "pass of another rank": (make_layout(), 0, replaced(Forward, 0, Forward(2, 0)), "its position is on another rank"),
    "pass of a micro-batch too many": (make_layout(), 0, replaced(Forward, 0, Forward(0, 2)), "no such micro-batch"),
    "missing reduction": (OFFLOADED, 0, without(Reduce), "are not reduced"),
    "double reduction": (OFFLOADED, 0, twice(Reduce), "it is reduced already"),
    "reduction before the last gradient": (OFFLOADED, 0, moved(Reduce, 0, Backward, 1), "its gradient lacks"),
    "common gradients reduced in different order": (
        TIED,
        0,
        swapped(Reduce, -2, -1),
        r"rank 0 begins Reduce\(unit=3\) where rank 1 begins Reduce\(unit=2\)",
    ),
    "common units gathered in different order": (
        TIED,
        1,
        swapped(Fetch, 0, 1),
        r"rank 0 begins Fetch\(unit=1, .*\) where rank 1 begins Fetch\(unit=2",
    ),
    "common unit gathered by one rank alone": (TIED, 1, without(Fetch), "its unit has no working copy"),
    "common unit dropped": (TIED, 1, lambda records: records.append(Drop(1)), "its working copy must stay"),
    "common unit gathered behind a wait for its other user": (
        TIED_ENDS,
        1,
        moved(Fetch, 0, Backward, 0),
        "it never ends: rank 0 waits in Forward",
    ),
    "common gradient reduced while its other user needs a message": (TIED_ENDS, 1, reduced_at_once, "it never ends"),
    "update before the last gradient": (EARLY, 0, moved(Update, 0, Backward, 0), "its gradient is not reduced"),
    "update before all agree": (OFFLOADED, 0, moved(Update, 0, Agree, 0), "not all ranks have agreed"),
    "updated twice": (OFFLOADED, 0, twice(Update), "it is updated already"),
    "forgotten update": (OFFLOADED, 0, without(Update), "are not updated"),
    "fetched after its update": (
        EARLY,
        1,
        lambda records: records.insert(index_of(records, Update, 0, unit=6) + 1, Fetch(6)),
        "its update has started|its working copy exists already",
    ),
    "update of a unit that saves nothing, before the norm is known": (
        OFFLOADED,
        0,
        lambda records: records.insert(index_of(records, Agree), Speculate(0)),
        "must not start before the norm is known",
    ),
    "speculative update before the last gradient": (
        SPECULATIVE,
        0,
        moved(Speculate, 0, Backward, 0),
        "its gradient is not reduced",
    ),
    "speculative update after all agree": (SPECULATIVE, 0, moved(Speculate, 0, Update, 0), "the norm is known already"),
    "speculative update twice": (SPECULATIVE, 0, twice(Speculate), "its update has started"),
    "fetched after its speculative update": (
        SPECULATIVE,
        1,
        lambda records: records.insert(index_of(records, Speculate, 0) + 1, Fetch(7)),
        "its update has started|its working copy exists already",
    ),
    "speculative update that nothing completes": (SPECULATIVE, 0, without(Update), "are not updated"),
    "nobody agrees": (EARLY, 0, without(Agree), "not all ranks have agreed"),
    "agreed twice": (OFFLOADED, 0, twice(Agree), "all ranks agree only once"),
    "agreed so late that ranks wait for each other": (CROWDED, 0, moved(Agree, 0, Update, 0), "it never ends"),
    "layer not measured": (MEASURED, 0, without(Measure), "some layers are measured and others are not"),
    "measured before its gradient is complete": (MEASURED, 0, moved(Measure, 0, Backward, 1), "is not complete"),
    "measured twice": (MEASURED, 0, twice(Measure), "was measured before"),
    "layers measured in another order": (MEASURED, 1, _measured_last, "was measured before"),
    "measured although it shares nothing": (
        make_layout(measures=True),
        0,
        lambda records: records.append(Measure(1)),
        "no other layer uses its units",
    ),
    "tokens counted before experts are chosen": (
        SPREAD,
        0,
        moved(Count, 0, Route, 1),
        "no experts are chosen for micro",
    ),
    "tokens counted twice": (SPREAD, 0, twice(Count), "are counted already"),
    "experts chosen twice": (SPREAD, 0, twice(Route), "it has been already"),
    "experts chosen again in the backward pass": (
        SPREAD,
        0,
        lambda records: records.insert(index_of(records, Recompute), Route(3, 0)),
        "it has been already",
    ),
    "sent before tokens are counted": (
        SPREAD,
        0,
        moved(Exchange, 0, Count, 0),
        "nobody knows how many tokens go where",
    ),
    "sent twice": (SPREAD, 0, twice(Exchange), "it has been already"),
    "experts compute before their tokens are sent": (
        SPREAD,
        0,
        moved(ExpertForward, 0, Exchange, 0),
        "the exchange dispatch has not begun",
    ),
    "sent back before experts compute": (
        SPREAD,
        0,
        swapped_kinds(ExpertForward, Exchange, leg=Leg.COMBINE),
        "its experts have not computed",
    ),
    "nothing sent back": (SPREAD, 0, without(Exchange, leg=Leg.COMBINE), "the exchange combine has not begun"),
    "not computed again": (SPREAD, 0, without(Recompute), "its tokens are not here any more"),
    "computed again although it is kept": (
        KEPT,
        0,
        lambda records: records.insert(index_of(records, ExpertBackward), Recompute(3, 0)),
        "its graph was kept",
    ),
    "tokens not sent again": (
        SPREAD,
        0,
        without(Exchange, leg=Leg.DISPATCH_AGAIN),
        "the exchange dispatch again has not begun",
    ),
    "gradients not sent to experts": (
        SPREAD,
        0,
        without(Exchange, leg=Leg.COMBINE_GRADIENT),
        "the exchange combine gradient has not begun",
    ),
    "gradients sent before they are here": (
        SPREAD,
        0,
        lambda records: records.insert(0, records.pop(index_of(records, Exchange, leg=Leg.COMBINE_GRADIENT))),
        "the gradient of its output is not here",
    ),
    "gradients of tokens sent before experts have them": (
        SPREAD,
        0,
        swapped_kinds(ExpertBackward, Exchange, leg=Leg.DISPATCH_GRADIENT),
        "its experts have no gradients of tokens yet",
    ),
    "gradients of tokens not sent back": (
        SPREAD,
        0,
        without(Exchange, leg=Leg.DISPATCH_GRADIENT),
        "the exchange dispatch gradient has not begun",
    ),
    "experts without a backward pass": (SPREAD, 0, without(ExpertBackward), "its experts have no gradients of tokens"),
    "experts reduced before their last pass": (SPREAD, 0, reduced_early, "its gradient lacks"),
    "experts used without a working copy": (SPREAD_AND_CUT, 0, without(Fetch, unit=5), "its unit has no working copy"),
    "an exchange where no experts are spread": (
        SPREAD,
        1,
        lambda records: records.insert(0, Exchange(Leg.DISPATCH, 2, 0)),
        "its position has no experts on other ranks",
    ),
    **{
        f"choices {what}{where}": (layout, 0, edit, fault)
        for where, layout, first in (("", BALANCED, Forward), (" of spread experts", SPREAD_AND_BALANCED, Route))
        for what, edit, fault in (
            ("not summed", without(SumChoices), "the choices of its experts in the whole step are not known yet"),
            ("summed twice", twice(SumChoices), "they are summed already"),
            ("summed before the last is made", moved(SumChoices, 0, first, 1), "no experts are chosen for micro-batch"),
        )
    },
    "choices summed that nobody needs": (
        SPREAD,
        0,
        lambda records: records.insert(index_of(records, Count), SumChoices(1)),
        "no loss depends on the choices of its experts",
    ),
    "choices summed where there are no experts": (
        BALANCED,
        1,
        lambda records: records.insert(0, SumChoices(2)),
        "no loss depends on the choices of its experts",
    ),
    "group sent back before its last experts compute": (
        GROUPED,
        0,
        without(ExpertForward, group=1, micro_batch=1),
        "its experts have not computed",
    ),
    "gradients of tokens sent before the last group has them": (
        GROUPED,
        0,
        sent_before_the_last_group,
        "its experts have no gradients of tokens",
    ),
    "group computes on another group's weights": (
        GROUPED,
        0,
        replaced(ExpertForward, 0, ExpertForward(1, 0, 1)),
        "its unit has no working copy",
    ),
    "group fetched before its tokens are counted": (
        replace(GROUPED, homes=everywhere("Host", 8)),
        0,
        fetched_before_counted,
        "nobody knows yet whether tokens came for it",
    ),
    "group read before its tokens are counted": (
        GROUPED,
        0,
        read_before_counted,
        "nobody knows yet whether tokens came for it",
    ),
    "group fetched whether tokens came or not": (
        GROUPED,
        0,
        replaced_where(Fetch, Fetch(5), unit=5),
        "it is fetched whether tokens came for it or not",
    ),
    "block fetched only where tokens came": (
        GROUPED,
        0,
        replaced_where(Fetch, Fetch(1, 1), unit=1),
        "it is needed whether tokens came or not",
    ),
    "group fetched for a layer that does not use it": (
        GROUPED,
        0,
        replaced_where(Fetch, Fetch(5, 3), unit=5),
        "position 3 does not use it",
    ),
    "group read for another layer": (
        GROUPED_AND_SHARED,
        0,
        replaced_where(Fetch, Fetch(3, 1), unit=3, wanted_by=2),
        "its weights were read for position 2",
    ),
    "group used by another layer than it was fetched for": (
        replace(GROUPED_AND_SHARED, window=2),
        0,
        kept_for_the_next_layer,
        "its unit was fetched for the tokens of position 1",
    ),
    "group fetched a third time": (GROUPED, 0, fetched_again, "it is fetched a third time for one position"),
    "group reduced before its last micro-batch": (
        GROUPED,
        0,
        reduced_too_soon,
        "its gradient lacks ExpertBackward",
    ),
    "agreed before the loss": (EARLY, 1, moved(Agree, 0, Backward, 0), "the loss is not known yet"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_checker_refuses_each_defective_plan(name: str) -> None:
    layout, rank, edit, fault = DEFECTS[name]
    good = measuring_plan(layout) if layout.measures else step_plan(layout)
    check_plan(layout, good)
    with pytest.raises(PlanError, match=fault):
        check_plan(layout, _edited(good, rank, edit))


def _edited(plan: Plan, rank: int, edit: Edit) -> Plan:
    records = list(plan[rank])
    edit(records)
    changed: RankPlan = tuple(records)
    assert changed != plan[rank], "the edit changes nothing"
    return (*plan[:rank], changed, *plan[rank + 1 :])


def test_common_units_are_gathered_first_and_reduced_last_in_one_order() -> None:
    for layout in (TIED, TIED_ENDS, replace(TIED, homes=everywhere("Disk", 3), clipping="PerUnit")):
        for rank, records in enumerate(step_plan(layout)):
            common, passes = layout.common_units(rank), [r for r in records if isinstance(r, Pass)]
            for kind, around in (
                (Fetch, records[: records.index(passes[0])]),
                (Reduce, records[records.index(passes[-1]) :]),
            ):
                found = [r.unit for r in around if isinstance(r, kind) and layout.is_common(r.unit)]
                assert found == [*common] == [*dict.fromkeys(found)]


def test_checker_refuses_ranks_that_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 needs the second layer's output of micro-batch 0 before it computes micro-batch 1, with which rank 1
    starts."""
    layout, orders = make_layout(), compute_order

    def circular(layout: Layout, rank: int) -> list[Compute]:
        order = orders(layout, rank)
        if rank == 0:
            order.insert(
                index_of(order, Forward, position=1, micro_batch=1), order.pop(index_of(order, Forward, position=3))
            )
        else:
            first, second = (index_of(order, Forward, position=2, micro_batch=m) for m in (0, 1))
            order[first], order[second] = order[second], order[first]
        return order

    check_plan(layout, step_plan(layout))
    monkeypatch.setattr(lower, "compute_order", circular)
    with pytest.raises(PlanError, match=r"it never ends: rank 0 waits in .*; rank 1 waits in"):
        check_plan(layout, step_plan(layout))
