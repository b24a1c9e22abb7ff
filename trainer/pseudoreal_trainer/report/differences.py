"""Differences between the configurations of several jobs. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from pseudoreal_trainer.report.phases import PhaseFacts

MOST_DIFFERENCES = 300
_OF_A_RUN = (
    *("job", "execution", "workDirectory", "objectStorage", "offloadDirectory", "traceDirectory", "discards"),
    *("continues", "index", "phase", "stage", "logging"),
)
"""Fields that differ between any two runs, or that may hold credentials, as the URL of a sink."""
ABSENT = "–"


@dataclass(frozen=True)
class Difference:
    field: str
    """Path of the field, as phases[real].batch.sequences."""
    values: tuple[str, ...]
    """Value in each job; `ABSENT` where the field is not set, or the phase or its configuration is not known."""


def differences_of(jobs: Sequence[Sequence[PhaseFacts]]) -> list[Difference]:
    """Return the fields in which the jobs differ; at most `MOST_DIFFERENCES`."""
    flat = [dict(_fields_of(job)) for job in jobs]
    fields = dict.fromkeys(field for job in flat for field in job)
    rows = [Difference(field, tuple(job.get(field, ABSENT) for job in flat)) for field in fields]
    return [row for row in rows if len(set(row.values)) > 1][:MOST_DIFFERENCES]


def _fields_of(phases: Sequence[PhaseFacts]) -> Iterator[tuple[str, str]]:
    for phase in phases:
        if phase.config is not None:
            fields = {name: value for name, value in phase.config.to_dict().items() if name not in _OF_A_RUN}
            yield from _flat(fields, f"phases[{phase.name}]")


def _flat(value: JsonValue, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from _flat(each, f"{path}.{name}")
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for index, each in enumerate(value):
            yield from _flat(each, f"{path}[{index}]")
    else:
        yield path, str(value)
