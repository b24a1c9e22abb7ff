"""What the operator has counted since it started; `/healthz` shows it."""

from dataclasses import dataclass


@dataclass
class Counts:
    refused_statuses: int = 0
    """Statuses that the API server took only without their texts."""
