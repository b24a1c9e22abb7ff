"""Scenarios in which the engine is checked for races: every home, order, clipping and kind of unit, on one rank and on
several, with and without a device."""

import json

from tests.unit.trainer.engine.races.support.scenario import Scenario
from tests.unit.trainer.engine.support.cases import EIGHT_IN_BALANCE, Case

_MIXTURE = json.dumps(
    {
        "family": "Mixtral",
        "attention": {"heads": 2},
        "feedForward": {"size": 12},
        "experts": {"type": "TopK", "count": 4, "topK": {"perToken": 2}},
    }
)
_BY_STEP = json.dumps(
    {
        "feedForward": {"size": 12},
        "experts": {
            "type": "TopK",
            "count": 4,
            "topK": {"perToken": 2, "size": 8, "auxiliaryLoss": "0.1", "balanceOver": "Step"},
        },
    }
)


def _case(**fields: object) -> Case:
    """Return a case with few layers, whose working copies have another dtype than its masters."""
    return Case(**{"precision": "bfloat16", "layers": 2} | fields)  # type: ignore[arg-type]


ONE_RANK = [
    Scenario(_case()),
    Scenario(_case(homes="h", clipping="Global")),
    Scenario(_case(homes="h", clipping="None", window=1, micro_batches=4)),
    Scenario(_case(homes="h", clipping="PerUnit", recompute=False, order="GPipe")),
    Scenario(_case(homes="D", clipping="Global")),
    Scenario(_case(homes="D", clipping="None", window=1, layers=4)),
    Scenario(_case(homes="dhD", clipping="PerUnit", layers=4)),
    Scenario(_case(homes="dhD", clipping="Global", precision="float32", layers=4)),
    Scenario(_case(homes="hd", stash=True, order="1F1B", micro_batches=4)),
    Scenario(_case(homes="h", stash=True, micro_batches=4)),
    Scenario(_case(homes="h", layers=4, blocks=2, clipping="Global", next_sharing=(4, "Cycle"))),
    Scenario(_case(homes="hD", drawn=_MIXTURE)),
    Scenario(_case(homes="h", experts=6, prototypes=3)),
    Scenario(_case(homes="h", drawn=_MIXTURE, expert_groups=2, clipping="Global", idle="Skip")),
    Scenario(_case(homes="D", drawn=_MIXTURE, expert_groups=4, clipping="None")),
    Scenario(_case(homes="d", options="in balance", layers=4, clipping="Global")),
    Scenario(_case(homes="h", tied=True, documents=True, loss_chunk=5, z_loss="1e-3")),
    Scenario(_case(homes="h", clipping="Global", multipliers=(("Attention", "0.5", "2"), ("Norms", "2", "1"))), threads=2),
    Scenario(_case(homes="h"), traces=True),
]
SEVERAL_RANKS = [
    Scenario(_case(data=2, sharding="Full", homes="h", clipping="Global")),
    Scenario(_case(data=2, sharding="Full", homes="dhD", clipping="PerUnit", window=1)),
    Scenario(_case(data=2, sharding="Full", homes="d", clipping="None")),
    Scenario(_case(data=2, sharding="Gradients", homes="d", clipping="Global")),
    Scenario(_case(data=2, sharding="Optimizer", homes="d", clipping="PerUnit")),
    Scenario(_case(data=2, sharding="None", homes="dh", clipping="Global")),
    Scenario(_case(pipeline=2, order="1F1B", micro_batches=4, homes="h", clipping="Global")),
    Scenario(_case(pipeline=2, order="Layered", homes="d", clipping="PerUnit", documents=True)),
    Scenario(_case(pipeline=2, order="GPipe", micro_batches=4, stash=True, homes="hd")),
    Scenario(_case(pipeline=2, order="Interleaved", layers=4, micro_batches=4, homes="h", recompute=False)),
    Scenario(_case(pipeline=2, blocks=1, homes="h", tied=True, clipping="Global")),
    Scenario(_case(pipeline=2, layers=4, blocks=2, pattern="Segment", homes="d", next_sharing=(4, "Cycle"))),
    Scenario(_case(data=2, expert_ranks=2, drawn=_MIXTURE, homes="h", clipping="Global")),
    Scenario(_case(data=2, expert_ranks=2, drawn=_MIXTURE, homes="hD", expert_groups=2, recompute=False)),
    Scenario(_case(data=2, sharding="Full", drawn=_MIXTURE, homes="h", expert_groups=2, clipping="Global")),
    Scenario(_case(data=2, drawn=EIGHT_IN_BALANCE, expert_ranks=2, homes="d", clipping="Global")),
    Scenario(_case(data=2, drawn=_BY_STEP, homes="h", sharding="Full")),
    Scenario(_case(data=2, sharding="Full", replicas=2, homes="dh", clipping="PerUnit")),
    Scenario(_case(data=4, sharding="Full", replicas=2, homes="dh", clipping="Global")),
]
WITHOUT_DEVICE = [
    Scenario(scenario.case, "cpu", scenario.threads)
    for scenario in (
        *(ONE_RANK[4], ONE_RANK[17]),
        *(SEVERAL_RANKS[index] for index in (0, 1, 3, 5, 6, 10, 11, 12, 14, 16, 17, 18)),
    )
]
ELASTIC = [
    Scenario(_case(data=data, sharding="Full" if data > 1 else "None", homes="h", sequences=6, micro_batches=4 // data or 1))
    for data in (1, 2, 3)
]
"""An elastic phase with one, two and three workers."""
SCENARIOS = [*ONE_RANK, *SEVERAL_RANKS, *ELASTIC, *WITHOUT_DEVICE]
