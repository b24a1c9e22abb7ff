"""Process groups that neighbouring cases share if they need the same ones: creating groups takes longer than many a
case.

Groups are destroyed when there are many, as each has threads, one of which wakes up a hundred times a second.
"""

import gc
from dataclasses import dataclass
from typing import Any

from pseudoreal_trainer.engine.ranks.mesh import Mesh, open_mesh
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.layout import Layout

KEPT = 16
_made: dict[tuple[Any, ...], Mesh] = {}
"""Meshes of the newest cases, by the properties that their groups depend on."""


@dataclass(frozen=True)
class KeptMesh(Mesh):
    def close(self) -> None:
        """Do nothing: the next case may use the groups."""


def mesh_of(layout: Layout, ranks: Ranks) -> Mesh:
    """Return the mesh of this rank. Every rank calls this for the same layouts in one order."""
    if ranks.world == 1:
        return open_mesh(layout, ranks)
    needed = groups_of(layout)
    if needed not in _made:
        if len(_made) == KEPT:
            _end_all()
        _made[needed] = open_mesh(layout, ranks)
    return KeptMesh(**vars(_made[needed]) | {"layout": layout, "ranks": ranks})


def groups_of(layout: Layout) -> tuple[Any, ...]:
    """Return the properties of a layout that its groups depend on."""
    places = tuple(map(layout.rank_of, range(layout.head + 1)))
    sizes = (layout.pipeline, layout.data, layout.replicas, layout.expert_ranks, layout.expert_groups)
    return (*sizes, places, layout.users, layout.measures, layout.balances_steps)


def _end_all() -> None:
    for mesh in _made.values():
        mesh.close()
    _made.clear()
    # Engines that are done lie in cycles, and hold the groups.
    gc.collect()
