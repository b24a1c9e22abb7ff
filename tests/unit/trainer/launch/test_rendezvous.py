"""Where pods meet, first and after restarts in place."""

import socket

import pytest
from pseudoreal_trainer.launch.rendezvous import MEET_SECONDS, await_worker_0, rendezvous


def test_worker_0_holds_the_rendezvous() -> None:
    """Whatever the machine is called: in its node's network a pod has the name of the node."""
    c10d = {"PET_RDZV_BACKEND": "c10d"}
    assert rendezvous(c10d | {"PET_NODE_RANK": "0"}) == {"PET_RDZV_CONF": "is_host=true,join_timeout=604800"}
    assert rendezvous(c10d | {"PET_NODE_RANK": "1"}) == {"PET_RDZV_CONF": "is_host=false,join_timeout=604800"}
    assert rendezvous({"PET_NODE_RANK": "0"}) == {}


def test_the_other_workers_wait_until_worker_0_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pseudoreal_trainer.launch.rendezvous._LOG_SECONDS", 0.0)
    with socket.socket() as host:
        host.bind(("127.0.0.1", 0))
        environment = {"PET_RDZV_BACKEND": "c10d", "PET_NODE_RANK": "1"}
        environment["PET_RDZV_ENDPOINT"] = f"127.0.0.1:{host.getsockname()[1]}"
        asked: list[bool] = []

        def look() -> bool:
            asked.append(True)
            if len(asked) == 3:
                host.listen()
            return False

        assert await_worker_0(environment, look)
        assert len(asked) == 3
    said = capsys.readouterr().out
    assert said.count("waits_for_worker_0") == 2
    assert "refused" in said
    assert await_worker_0(environment | {"PET_NODE_RANK": "0"}, look)
    assert not await_worker_0(environment, lambda: True)


def test_each_restart_in_place_meets_at_a_port_of_its_own_and_not_for_days() -> None:
    given = {
        "PET_RDZV_BACKEND": "c10d",
        "PET_NODE_RANK": "1",
        "PET_RDZV_ENDPOINT": "job-e1-0.service:29400",
        "PET_RDZV_ID": "uid-real-1",
    }
    assert rendezvous(given, 2) == {
        "PET_RDZV_CONF": f"is_host=false,join_timeout={MEET_SECONDS}",
        "PET_RDZV_ID": "uid-real-1-2",
        "PET_RDZV_ENDPOINT": "job-e1-0.service:29402",
    }
