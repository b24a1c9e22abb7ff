"""Rendezvous identity of a pod: its worker index, the pod that all meet at, and its remaining restarts. Pure."""

from dataclasses import dataclass, replace

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.reports import Membership


@dataclass(frozen=True)
class Place:
    """A pod's part in one rendezvous."""

    restart: int
    """Number of the restart in place with which the place starts; 0: the pods' first rendezvous."""
    worker: int
    """Worker index of the pod."""
    host: int
    """Completion index of the pod of worker 0, which hosts the rendezvous."""
    own_restarts: int
    """Number of further restarts in place that the pod may decide on by itself."""
    membership: int = 0
    """Number of the restart in place with which the present membership started; 0: each worker is the pod of its
    number."""

    def again(self) -> "Place | None":
        """Return the place after a restart that the pod decides on; None: no such restart is left."""
        if self.own_restarts == 0:
            return None
        return replace(self, restart=self.restart + 1, own_restarts=self.own_restarts - 1)


def first_place(config: PhaseConfig, index: int) -> Place | None:
    """Return the place of the pod with this completion index before any takeover; None: it is a spare pod."""
    return Place(0, index, 0, config.in_place) if index < config.workers else None


def place_in(membership: Membership, config: PhaseConfig, index: int) -> Place | None:
    """Return the place that a membership gives to the pod with this completion index; None: it gives none."""
    worker = membership.worker_of(index, config.workers)
    if worker is None:
        return None
    return Place(membership.restart, worker, membership.pod_of(0), membership.own_restarts, membership.restart)
