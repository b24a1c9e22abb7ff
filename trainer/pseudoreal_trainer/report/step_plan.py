"""The picture of a phase's plan: the records of a step on the streams of each rank, as `pseudoreal plan` draws them.
Pure."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pseudoreal_api.resolved.config import PhaseConfig

from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.estimate.report import unit_time
from pseudoreal_trainer.estimate.time.timeline import Timeline, timeline
from pseudoreal_trainer.plan.effects import Resource
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.memory.from_config import fixed_layout, phase_sizes, placed_layout
from pseudoreal_trainer.plan.memory.homes import activation_peaks
from pseudoreal_trainer.plan.sizes import Device
from pseudoreal_trainer.report.phases import is_plannable

KINDS = ("Forward", "Backward", "Fetch", "Reduce", "Update")
"""Kinds of records with a colour of their own."""
_MOST_PASSES, _MOST_RECORDS = 1000, 3000
"""Most passes (layers times micro-batches) of a step that is simulated; most records that are drawn."""
_ORDER = [resource.value for resource in Resource]


@dataclass(frozen=True)
class Span:
    kind: str
    name: str
    """The record, as text."""
    begin: float
    end: float
    """In forward passes of a layer. Equal to `begin`: the record takes no time here."""


@dataclass(frozen=True)
class Stream:
    rank: int
    resource: str
    spans: Sequence[Span]

    @property
    def busy(self) -> float:
        return sum(span.end - span.begin for span in self.spans)

    @property
    def counts(self) -> Counter[str]:
        return Counter(span.kind for span in self.spans)


@dataclass(frozen=True)
class StepPicture:
    phase: str
    streams: Sequence[Stream]
    duration: float
    """In forward passes of a layer."""
    ranks_left_out: int


def step_picture(config: PhaseConfig, device: Device) -> StepPicture | None:
    """Return the picture of a step; None if the plan is too large for one, or the configuration contradicts itself.

    A pass of a layer is the unit of time; everything else takes none, as where `pseudoreal plan` has no profile of a
    machine.
    """
    if not is_plannable(config, _MOST_PASSES):
        return None
    try:
        sizes = phase_sizes(config, device)
        layout = placed_layout(config, sizes, activation_peaks(fixed_layout(config, sizes), sizes))
        line = timeline(layout, step_plan(layout), unit_time(layout))
    except (InvalidJobError, ValueError, ArithmeticError, AssertionError, IndexError, KeyError):
        return None
    return _picture(config.phase, line)


def _picture(phase: str, line: Timeline) -> StepPicture:
    rows: defaultdict[tuple[int, str], list[Span]] = defaultdict(list)
    for task, span in zip(line.tasks, line.spans, strict=True):
        # Updates of the step before are cut at the start of the step.
        if task.record is not None and (span.end > 0 or span.begin >= 0):
            name = type(task.record).__name__
            rows[task.stream].append(Span(name, str(task.record), max(span.begin, 0.0), span.end))
    ranks = sorted({rank for rank, _ in rows})
    drawn: list[Stream] = []
    left = _MOST_RECORDS
    for rank in ranks:
        own = [(resource, spans) for (of, resource), spans in rows.items() if of == rank]
        left -= sum(len(spans) for _, spans in own)
        if drawn and left < 0:
            break
        drawn += [Stream(rank, resource, spans) for resource, spans in sorted(own, key=lambda row: _place(row[0]))]
    shown = {stream.rank for stream in drawn}
    return StepPicture(phase, drawn, line.seconds, len(ranks) - len(shown))


def _place(resource: str) -> int:
    return next(index for index, name in enumerate(_ORDER) if resource.startswith(name))
