"""Rendezvous settings of pods, at the first start and after restarts in place."""

import socket
from math import inf
from time import monotonic
from typing import Any

import pytest
from pseudoreal_trainer.runtime.rendezvous.identity import (
    RESTART_SECONDS,
    SPARE_RESTART_SECONDS,
    RendezvousIdentity,
    await_worker_0,
    rendezvous,
    rendezvous_deadline,
)


def test_the_first_rendezvous_waits_for_days(config: Any) -> None:
    c10d, second = {"PET_RDZV_BACKEND": "c10d"}, RendezvousIdentity(0, 1, 0, 3, is_first=True)
    assert rendezvous(c10d, config(0), second) == {"PET_NODE_RANK": "1", "PET_RDZV_CONF": "join_timeout=604800"}
    assert rendezvous({"PET_NODE_RANK": "0"}, config(0), second) == {}


def test_workers_wait_until_worker_0_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pseudoreal_trainer.runtime.rendezvous.identity._LOG_SECONDS", 0.0)
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


GIVEN = {
    "PET_RDZV_BACKEND": "c10d",
    "PET_NODE_RANK": "1",
    "PET_RDZV_ENDPOINT": "job-e1-0.service:29400",
    "PET_RDZV_ID": "uid-real-1",
}


def test_each_restart_in_place_has_its_own_port_and_a_short_time_limit(config: Any) -> None:
    assert rendezvous(GIVEN, config(0), RendezvousIdentity(2, 1, 0, 1)) == {
        "PET_NODE_RANK": "1",
        "PET_RDZV_CONF": f"join_timeout={RESTART_SECONDS}",
        "PET_RDZV_ID": "uid-real-1-2",
        "PET_RDZV_ENDPOINT": "job-e1-0.service:29402",
    }


@pytest.mark.parametrize("spares", [0, 1])
def test_pods_without_earlier_ranks_wait_for_days_in_any_membership(spares: int, config: Any) -> None:
    """A queue admits an execution again after a takeover: the membership stays, and all pods are yet to start."""
    phase = config(0).model_copy(update={"spares": spares})
    first, later = (RendezvousIdentity(3, 1, 0, 1, 2, is_first=is_first) for is_first in (True, False))
    limits = [rendezvous(GIVEN, phase, identity).pop("PET_RDZV_CONF") for identity in (first, later)]
    limit = SPARE_RESTART_SECONDS if spares else RESTART_SECONDS
    assert limits == ["join_timeout=604800", f"join_timeout={limit}"]
    assert rendezvous_deadline(phase, first) == inf
    assert rendezvous_deadline(phase, later) <= monotonic() + limit


def test_the_rendezvous_is_at_a_spare_that_became_worker_0(config: Any) -> None:
    with_spares = config(0).model_copy(update={"spares": 1})
    found = rendezvous(GIVEN, with_spares, RendezvousIdentity(3, 0, 12, 1))
    assert found["PET_RDZV_ENDPOINT"] == "job-e1-12.service:29403"
    assert (found["PET_NODE_RANK"], found["PET_RDZV_CONF"]) == ("0", f"join_timeout={SPARE_RESTART_SECONDS}")
    alone = GIVEN | {"PET_RDZV_ENDPOINT": "127.0.0.1:29400"}
    assert rendezvous(alone, with_spares, RendezvousIdentity(3, 0, 12, 1))["PET_RDZV_ENDPOINT"] == "127.0.0.1:29403"


def test_rendezvous_of_two_memberships_have_different_names(config: Any) -> None:
    """Both use one port, where the pods of the other membership hold another key."""
    before, after = (RendezvousIdentity(3, 1, 0, 1, membership) for membership in (0, 2))
    found = [rendezvous(GIVEN, config(0), place) for place in (before, after)]
    assert [each["PET_RDZV_ID"] for each in found] == ["uid-real-1-3", "uid-real-1-3-of-2"]
    assert found[0]["PET_RDZV_ENDPOINT"] == found[1]["PET_RDZV_ENDPOINT"]
