"""Traffic of a phase's ranks between the topology domains and nodes of its pods. Pure."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from pseudoreal_api.spec.pod import Topology
from pseudoreal_trainer.cli.plan_display import EXCHANGES
from pseudoreal_trainer.plan.mesh import Mesh
from pseudoreal_trainer.plan.placement.flows import Exchange, Flow, bytes_between
from pseudoreal_trainer.plan.placement.order import Place, worker_order
from pseudoreal_trainer.quantity import readable_bytes

from pseudoreal_client.capacity.fit import Fit


@dataclass(frozen=True)
class Level:
    """Traffic between all places of one kind."""

    places: str
    """Name of the places in the plural: nodes, or values of a topology key."""
    count: int
    bytes: dict[Exchange, int]
    """Bytes per step of each kind of exchange."""

    def line(self) -> str:
        found = [f"{EXCHANGES[exchange]} {readable_bytes(size)}" for exchange, size in self.bytes.items() if size]
        return f"between {self.count} {self.places}, bytes a step: {', '.join(found) or 'none'}"

    def as_json(self) -> dict[str, Any]:
        return {"places": self.places, "count": self.count, "bytes_per_step": self.bytes}


def levels_of(fit: Fit, topology: Topology | None, mesh: Mesh, flows: Sequence[Flow]) -> list[Level]:
    """Return the levels over which the pods are spread, widest first.

    With a topology, workers are numbered like the pods number themselves (`worker_order`).
    """
    places = [Place(fit.domains.get(node, ""), node) for node, count in fit.placement.items() for _ in range(count)]
    order = worker_order(places, mesh, flows) if topology else range(len(places))
    of_ranks = [places[worker] for worker in order for _ in range(mesh.ranks // len(places))]
    levels = [_level("nodes", of_ranks, flows)]
    if topology:
        levels.insert(0, _level(f"values of {topology.key}", [place.domain for place in of_ranks], flows))
    return [level for level in levels if level.count > 1]


def _level(places: str, of_ranks: Sequence[Hashable], flows: Sequence[Flow]) -> Level:
    return Level(places, len(set(of_ranks)), bytes_between(flows, of_ranks))
