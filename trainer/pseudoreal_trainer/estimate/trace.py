"""Estimated steps as Chrome trace events (chrome://tracing, Perfetto), in the format of a rank's real timeline
(`engine.ranks.trace`): one viewer shows both. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from pseudoreal_trainer.estimate.time.timeline import Timeline

Event = dict[str, Any]


def trace_of(steps: Mapping[str, Timeline], microseconds: float) -> dict[str, Any]:
    """Return the content of a trace file: a process for each pipeline rank of each phase, a thread for each resource.
    `steps`: name of a phase -> its step. `microseconds`: length of a timeline's unit of time in the trace."""
    events: list[Event] = []
    first = 0
    for phase, step in steps.items():
        ranks = 1 + max((task.stream[0] for task in step.tasks), default=-1)
        events += [_process_name(first + rank, f"phase {phase}, pipeline rank {rank}") for rank in range(ranks)]
        events += _events(step, first, microseconds)
        first += ranks
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process_name(process: int, name: str) -> Event:
    return {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}


def _events(step: Timeline, first: int, microseconds: float) -> Iterator[Event]:
    """Yield the tasks that take time in the step. Updates of the previous step are cut at the start of the step."""
    for task, span in zip(step.tasks, step.spans, strict=True):
        if task.record is None or span.end <= max(span.begin, 0.0):
            continue
        rank, stream = task.stream
        begin = max(span.begin, 0.0)
        yield {
            "name": type(task.record).__name__,
            "ph": "X",
            "ts": begin * microseconds,
            "dur": (span.end - begin) * microseconds,
            "pid": first + rank,
            "tid": stream,
            "args": {key: _plain(getattr(task.record, key)) for key in task.record.__slots__},
        }


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
