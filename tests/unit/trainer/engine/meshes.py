"""Groups of ranks that are made once for all cases that need the same ones: they take longer than many a case."""

from dataclasses import dataclass
from typing import Any

from pseudoreal_trainer.engine.ranks.mesh import Mesh, open_mesh
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.layout import Layout

_made: dict[Any, Mesh] = {}


@dataclass(frozen=True)
class KeptMesh(Mesh):
    def close(self) -> None:
        """Leaves the groups to the next case. They end with the process."""


def mesh_of(layout: Layout, ranks: Ranks) -> Mesh:
    """The mesh of this rank. Every rank calls this for the same layouts in one order."""
    if ranks.world == 1:
        return open_mesh(layout, ranks)
    places = tuple(map(layout.rank_of, range(layout.head + 1)))
    sizes = (layout.pipeline, layout.data, layout.replicas, layout.expert_ranks, layout.expert_groups)
    needed = (*sizes, places, layout.users, layout.measures, layout.balances_steps)
    if needed not in _made:
        _made[needed] = open_mesh(layout, ranks)
    return KeptMesh(**vars(_made[needed]) | {"layout": layout, "ranks": ranks})
