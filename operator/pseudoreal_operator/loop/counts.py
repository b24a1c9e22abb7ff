"""What the operator has counted since it started; `/healthz` shows it."""

from dataclasses import dataclass


@dataclass
class Counts:
    refused_statuses: int = 0
    """Statuses that the API server took only without their texts."""
    internal_errors: int = 0
    """Passes that ended by a mistake of the operator."""
    lost_events: int = 0
    """Events that were given up."""
