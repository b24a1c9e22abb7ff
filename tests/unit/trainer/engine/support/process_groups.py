"""Process groups, shared by consecutive cases that need the same groups: their creation takes longer than many cases.

Groups are destroyed when there are many, because each has threads, and one of them wakes up a hundred times a second.
"""

import gc
from dataclasses import dataclass
from typing import Any

from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups, create_process_groups
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.layout import Layout

KEPT = 16
_made: dict[tuple[Any, ...], ProcessGroups] = {}
"""Groups of the newest cases, by the properties of a layout that they depend on."""


@dataclass(frozen=True)
class KeptProcessGroups(ProcessGroups):
    def close(self) -> None:
        """Do nothing: the next case may use the groups."""


def process_groups_of(layout: Layout, ranks: Ranks) -> ProcessGroups:
    """Return the groups of this rank. Every rank calls this for the same layouts in one order."""
    if ranks.world == 1:
        return create_process_groups(layout, ranks)
    needed = needed_groups(layout)
    if needed not in _made:
        if len(_made) == KEPT:
            _end_all()
        _made[needed] = create_process_groups(layout, ranks)
    return KeptProcessGroups(**vars(_made[needed]) | {"layout": layout, "ranks": ranks})


def needed_groups(layout: Layout) -> tuple[Any, ...]:
    """Return the properties of a layout that its groups depend on."""
    places = tuple(map(layout.rank_of, range(layout.head + 1)))
    sizes = (layout.pipeline, layout.data, layout.replicas, layout.expert_ranks, layout.expert_groups)
    return (
        *sizes,
        layout.context_ranks,
        layout.tensor_ranks,
        layout.folds,
        places,
        layout.users,
        layout.measures,
        layout.balances_steps,
    )


def _end_all() -> None:
    for groups in _made.values():
        groups.close()
    _made.clear()
    # Closed engines are in reference cycles, and hold the groups.
    gc.collect()
