"""From the workers' reported locations to their rank numbers."""

from typing import Any

import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.runtime.rendezvous import seats as module
from pseudoreal_trainer.runtime.rendezvous.seats import Seat, numbers


@pytest.fixture
def chain(job_body: dict[str, Any], config: Any) -> PhaseConfig:
    """Return a phase with four workers of one pipeline rank each."""
    job_body["spec"]["phases"][1] |= {"workers": 4, "parallelism": {"pipeline": 4, "schedule": "1F1B"}}
    found: PhaseConfig = config(1)
    return found


def seated(*places: str | None) -> list[Seat]:
    """Return workers in these topology domains, each on a node of its own."""
    return [Seat(worker, f"node-{worker}", place) for worker, place in enumerate(places)]


def test_without_a_topology_a_worker_has_the_number_of_its_pod(chain: PhaseConfig) -> None:
    assert numbers(seated(None, None, None, None)[::-1], chain) == [3, 2, 1, 0]


def test_workers_of_one_domain_are_neighbours(chain: PhaseConfig) -> None:
    assert numbers(seated("a", "b", "a", "b"), chain) == [0, 2, 1, 3]


def test_the_numbers_do_not_depend_on_who_comes_first(chain: PhaseConfig) -> None:
    there = seated("a", "b", "b", "a")
    found = dict(zip(range(4), numbers(there, chain), strict=True))
    come = [there[worker] for worker in (2, 0, 3, 1)]
    assert numbers(come, chain) == [found[seat.worker] for seat in come]


def test_where_no_node_has_the_label_nodes_count(chain: PhaseConfig) -> None:
    there = [Seat(worker, node, "") for worker, node in enumerate("xyxy")]
    assert numbers(there, chain) == [0, 2, 1, 3]


def test_what_cannot_be_placed_trains_by_the_numbers_of_its_pods(
    chain: PhaseConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no order")

    monkeypatch.setattr(module, "worker_order", broken)
    assert numbers(seated("a", "b", "a", "b"), chain) == [0, 1, 2, 3]
    assert "ranks_not_placed" in capsys.readouterr().out


def test_a_pod_says_where_it_is() -> None:
    pod = {"PET_NODE_RANK": "3", "PSEUDOREAL_NODE_NAME": "gpu-7"}
    assert Seat.of_pod(pod) == Seat(3, "gpu-7", None)
    assert Seat.of_pod(pod | {"PSEUDOREAL_TOPOLOGY_DOMAIN": "rack-1"}) == Seat(3, "gpu-7", "rack-1")
    assert Seat.of_pod({}) == Seat(0, "", None), "a process outside of a pod"
