"""The estimated timeline of updates on the host, beside copies of other units."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pseudoreal_api.spec.phase import Home, Offload
from pseudoreal_trainer.estimate.time.simulation import Span
from pseudoreal_trainer.estimate.time.timeline import timeline
from pseudoreal_trainer.plan.effects import Resource
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.memory.homes import choose_homes
from pseudoreal_trainer.plan.memory.tiers import Tiers, resident_bytes
from pseudoreal_trainer.plan.records import Fetch, Pass, Record, Reduce, Update

from tests.unit.trainer.plan.support.cases import everywhere, make_layout, make_sizes

LAYERS = 6


@dataclass(frozen=True)
class _Costs:
    """A pass and a copy take a second."""

    update: float
    """Seconds of an update on the host; on the device it takes none."""
    on_host: frozenset[int] = frozenset(range(LAYERS + 2))
    overlaps: bool = True
    cores: float | None = None

    def seconds(self, record: Record, resource: Resource, /) -> float:
        if isinstance(record, Update):
            return self.update if record.unit in self.on_host else 0.0
        copies = isinstance(record, Fetch) and resource is Resource.COPY_IN
        keeps = isinstance(record, Reduce) and resource is Resource.REDUCTION
        return float(isinstance(record, Pass) or copies or keeps)


def _spans(update: float) -> dict[Resource, list[tuple[int, Span]]]:
    """Return resource -> (unit, span) of its tasks in the first step, without a norm to wait for, with the state on the
    host."""
    layout = make_layout(LAYERS, 1, 1, homes=everywhere("Host", LAYERS), clipping="PerUnit")
    line, found = timeline(layout, step_plan(layout), _Costs(update)), dict[Resource, list[tuple[int, Span]]]()
    for task, span in zip(line.tasks, line.spans, strict=True):
        if isinstance(task.record, Fetch | Reduce | Update) and span.begin < span.end:
            found.setdefault(Resource(str(task.stream[1])), []).append((task.record.unit, span))
    return found


def test_three_units_are_copied_and_updated_at_the_same_time() -> None:
    spans = _spans(update=1.0)
    shared = [
        {one, two, three}
        for one, fetched in spans[Resource.COPY_IN]
        for two, updated in spans[Resource.UPDATE]
        for three, kept in spans[Resource.REDUCTION]
        if max(fetched.begin, updated.begin, kept.begin) < min(fetched.end, updated.end, kept.end)
    ]
    assert any(len(units) == 3 for units in shared)


def test_a_gradient_is_copied_while_another_is_updated_and_waits_for_the_one_before() -> None:
    spans = _spans(update=10.0)
    updates, kept = dict(spans[Resource.UPDATE]), spans[Resource.REDUCTION]
    assert len(kept) == LAYERS + 2
    for (before, _), (unit, later) in pairwise(kept[1:]):
        (second,) = (earlier for (earlier, _), (one, _) in pairwise(kept) if one == before)
        assert later.begin >= updates[second].end, "two gradients are on their way at most"
        assert later.begin < updates[before].end, unit


def test_the_blocks_that_a_budget_leaves_on_the_device_shorten_the_step_most() -> None:
    """With global clipping, updates on the host delay the next step's first passes, and overlap the later ones."""

    def seconds(of_blocks: Sequence[Home]) -> float:
        layout = make_layout(LAYERS, 1, 1, homes=("Host", *of_blocks, "Host"), clipping="Global")
        on_host = frozenset(unit for unit in range(layout.units) if layout.home(unit) == "Host")
        return timeline(layout, step_plan(layout), _Costs(2.0, on_host), steps=3).seconds

    near: list[Home] = ["Device"] * (LAYERS // 2)
    far: list[Home] = ["Host"] * (LAYERS // 2)
    first, last, none = seconds([*near, *far]), seconds([*far, *near]), seconds([*far, *far])
    assert first < last < none
    sizes, layout = make_sizes(LAYERS), make_layout(LAYERS, 1, 1)
    needed = resident_bytes(layout.with_homes(("Device", *near, *far, "Device")), sizes, 0).device
    budget = Offload.model_validate({"budget": {"device": needed}})
    assert choose_homes(budget, layout, sizes, (Tiers(),)) == ("Device", *near, *far, "Device")
