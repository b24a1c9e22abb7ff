"""Counts of the operator since it started; `/healthz` shows them."""

from dataclasses import dataclass


@dataclass
class Counts:
    refused_statuses: int = 0
    """Number of statuses that the API server took only without their texts."""
    internal_errors: int = 0
    """Number of passes that ended by a mistake of the operator."""
    lost_events: int = 0
    """Number of events that were given up."""
