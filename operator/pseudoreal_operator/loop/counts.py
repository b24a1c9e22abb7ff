"""Counters of the operator since its start, shown by `/healthz` and `/metrics`."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

_MEANINGS = {
    "refused_statuses": "Statuses that the API server took only without their texts, or without figures.",
    "internal_errors": "Passes that ended by a mistake of the operator.",
    "lost_events": "Events that were given up.",
}


@dataclass(eq=False)
class Counts(Collector):
    refused_statuses: int = 0
    """Number of statuses that the API server accepted only without their texts, or without figures."""
    internal_errors: int = 0
    """Number of passes that ended by a bug of the operator."""
    lost_events: int = 0
    """Number of events that were dropped without having been posted."""

    def collect(self) -> Iterator[Metric]:
        for name, meaning in _MEANINGS.items():
            yield CounterMetricFamily(f"pseudoreal_{name}", meaning, value=getattr(self, name))
