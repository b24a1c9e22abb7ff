"""The place of a pod: the worker that it is, where it meets the others, and how often it may do so anew. Pure."""

from dataclasses import dataclass, replace

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.reports import Membership


@dataclass(frozen=True)
class Place:
    restart: int
    """Number of the restart in place with which it begins; 0: of the pods' first meeting."""
    worker: int
    """Number of the worker that the pod is."""
    host: int
    """Completion index of the pod of worker 0, where all meet."""
    own_restarts: int
    """How many more restarts in place the pod may decide on by itself."""
    membership: int = 0
    """Number of the restart in place with which the present membership began; 0: each worker is the pod of its
    number."""

    def again(self) -> "Place | None":
        """The place after a restart that the pod decides on; None: it may not."""
        if self.own_restarts == 0:
            return None
        return replace(self, restart=self.restart + 1, own_restarts=self.own_restarts - 1)


def first_place(config: PhaseConfig, index: int) -> Place | None:
    """The place of the pod of a completion index before anything was lost; None: it is a spare one."""
    return Place(0, index, 0, config.in_place) if index < config.workers else None


def place_in(membership: Membership, config: PhaseConfig, index: int) -> Place | None:
    """The place that a membership gives to the pod of a completion index; None: it gives it none."""
    worker = membership.worker_of(index, config.workers)
    if worker is None:
        return None
    return Place(membership.restart, worker, membership.pod_of(0), membership.own_restarts, membership.restart)
