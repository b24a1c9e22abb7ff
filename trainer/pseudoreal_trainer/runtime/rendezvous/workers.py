"""Workers at a rendezvous, and the number (group rank) of each."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import structlog
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.reports import NODE_NAME, TOPOLOGY_DOMAIN

from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.memory.from_config import fixed_layout, phase_sizes, placed_layout
from pseudoreal_trainer.plan.memory.homes import activation_peaks
from pseudoreal_trainer.plan.placement.flows import flows_of
from pseudoreal_trainer.plan.placement.order import Order, Place, worker_order

log = structlog.get_logger()


@dataclass(frozen=True)
class WorkerDescription:
    """Index and location of a worker, as reported by the worker itself."""

    worker: int
    """Worker index."""
    node: str
    domain: str | None
    """Topology domain of the node; empty if unknown, None if the job has no topology."""

    @classmethod
    def of_pod(cls, environment: Mapping[str, str] = os.environ) -> Self:
        worker = int(environment.get("PET_NODE_RANK", "0"))
        return cls(worker, environment.get(NODE_NAME, ""), environment.get(TOPOLOGY_DOMAIN))


def group_ranks(descriptions: Sequence[WorkerDescription], config: PhaseConfig) -> list[int]:
    """Return the number (group rank) of each worker, in the order of the descriptions. The ranks of the worker with
    group rank n are numbered after the ranks of the worker with group rank n - 1.

    Raises ValueError if two pods have the same worker index, for example a pod thought to be lost and its replacement.
    """
    if len({description.worker for description in descriptions}) < len(descriptions):
        raise ValueError(
            f"two pods have come as one worker: {sorted(description.worker for description in descriptions)}"
        )
    workers = sorted(descriptions, key=lambda description: description.worker)
    order = _order(workers, config)
    found = {workers[worker].worker: number for number, worker in enumerate(order)}
    return [found[description.worker] for description in descriptions]


def _order(workers: Sequence[WorkerDescription], config: PhaseConfig) -> Order:
    """Return the order of the workers by topology, if the job has one, else by worker index. The order affects only
    speed: if the search fails, the workers stay in index order."""
    by_number = tuple(range(len(workers)))
    if any(description.domain is None for description in workers):
        return by_number
    try:
        return _order_by_place([Place(description.domain or "", description.node) for description in workers], config)
    except Exception:
        log.exception("ranks_not_placed")
        return by_number


def _order_by_place(places: Sequence[Place], config: PhaseConfig) -> Order:
    sizes = phase_sizes(config, "accelerator" if config.gpus else "cpu")
    layout = placed_layout(config, sizes, activation_peaks(fixed_layout(config, sizes), sizes))
    return worker_order(places, layout.mesh, flows_of(layout, sizes, step_plan(layout)))
