"""From the workers' reported locations to their rank numbers."""

from typing import Any

import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.runtime.rendezvous import workers as module
from pseudoreal_trainer.runtime.rendezvous.workers import WorkerDescription, group_ranks


@pytest.fixture
def chain(job_body: dict[str, Any], config: Any) -> PhaseConfig:
    """Return a phase with four workers of one pipeline rank each."""
    job_body["spec"]["phases"][1] |= {"workers": 4, "parallelism": {"pipeline": 4, "schedule": "1F1B"}}
    found: PhaseConfig = config(1)
    return found


def seated(*places: str | None) -> list[WorkerDescription]:
    """Return workers in these topology domains, each on a node of its own."""
    return [WorkerDescription(worker, f"node-{worker}", place) for worker, place in enumerate(places)]


def test_without_a_topology_the_group_rank_is_the_worker_index(chain: PhaseConfig) -> None:
    assert group_ranks(seated(None, None, None, None)[::-1], chain) == [3, 2, 1, 0]


def test_workers_of_one_domain_get_adjacent_group_ranks(chain: PhaseConfig) -> None:
    assert group_ranks(seated("a", "b", "a", "b"), chain) == [0, 2, 1, 3]


def test_group_ranks_do_not_depend_on_the_order_of_arrival(chain: PhaseConfig) -> None:
    there = seated("a", "b", "b", "a")
    found = dict(zip(range(4), group_ranks(there, chain), strict=True))
    come = [there[worker] for worker in (2, 0, 3, 1)]
    assert group_ranks(come, chain) == [found[seat.worker] for seat in come]


def test_without_topology_labels_workers_are_grouped_by_node(chain: PhaseConfig) -> None:
    there = [WorkerDescription(worker, node, "") for worker, node in enumerate("xyxy")]
    assert group_ranks(there, chain) == [0, 2, 1, 3]


def test_an_error_in_the_placement_falls_back_to_worker_indices(
    chain: PhaseConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no order")

    monkeypatch.setattr(module, "worker_order", broken)
    assert group_ranks(seated("a", "b", "a", "b"), chain) == [0, 1, 2, 3]
    assert "ranks_not_placed" in capsys.readouterr().out


def test_a_pod_describes_its_node_and_domain() -> None:
    pod = {"PET_NODE_RANK": "3", "PSEUDOREAL_NODE_NAME": "gpu-7"}
    assert WorkerDescription.of_pod(pod) == WorkerDescription(3, "gpu-7", None)
    assert WorkerDescription.of_pod(pod | {"PSEUDOREAL_TOPOLOGY_DOMAIN": "rack-1"}) == WorkerDescription(
        3, "gpu-7", "rack-1"
    )
    assert WorkerDescription.of_pod({}) == WorkerDescription(0, "", None), "a process outside of a pod"
