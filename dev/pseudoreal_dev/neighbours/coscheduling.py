"""Scheduler of scheduler-plugins with gang scheduling (coscheduling), for tests with the operator."""

from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.neighbours.building import Neighbour, built

_SCHEDULER = Neighbour(
    tool="coscheduling",
    program="coscheduling",
    module="sigs.k8s.io/scheduler-plugins",
    package="sigs.k8s.io/scheduler-plugins/cmd/scheduler",
    files={"podgroups.yaml": "config/crd/bases/scheduling.x-k8s.io_podgroups.yaml"},
)


@dataclass(frozen=True)
class Coscheduling:
    """Paths of the scheduler, and of the CustomResourceDefinition of its PodGroups."""

    program: Path
    definition: Path


def coscheduling() -> Coscheduling:
    """Return the scheduler pinned by dev/tools/coscheduling, after building it if needed."""
    folder = built(_SCHEDULER)
    return Coscheduling(folder / _SCHEDULER.program, folder / "podgroups.yaml")
