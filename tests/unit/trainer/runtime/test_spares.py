"""A spare pod takes over for a lost worker: real processes on loopback; the test plays the operator."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.messages import ExitCode
from pseudoreal_api.wire.reports import Membership, PodReport, Takeover
from pseudoreal_trainer.runtime.rendezvous.identity import RendezvousIdentity, identity_in, initial_identity
from pseudoreal_trainer.runtime.rendezvous.workers import WorkerDescription, group_ranks

from tests.support.pods import Pod
from tests.unit.trainer.runtime.support.pods import end_at_once, last_files, rank_that_trains, training
from tests.unit.trainer.runtime.support.server import Server, serving

PROGRAM = ("-m", "tests.unit.trainer.runtime.support.pod_program")
SPARE = 2
Pair = Callable[..., PhaseConfig]
_WHOLE: dict[str, str] = {}
"""Result of the undisturbed run, cached because it is the same for all tests."""


@pytest.fixture
def trio(pair: Pair) -> Pair:
    """Return a function that makes the configuration of a phase on two pods and a spare pod."""
    return lambda work="work": pair(work).model_copy(update={"spares": 1})


@pytest.fixture
def whole(pair: Pair, tmp_path: Path) -> dict[str, str]:
    """Return the last checkpoint's digests of an undisturbed run."""
    if not _WHOLE:
        config = pair("whole")
        with training(config, tmp_path / "pods-whole") as pods:
            assert [pod.wait() for pod in pods] == [0, 0], pods[0].said()
        _WHOLE.update(last_files(config))
    return _WHOLE


def give_place(server: Server, worker: int, waiting: int) -> None:
    """Give the spare pod the index of `worker`, once pod `waiting` waits for the takeover."""
    server.wait_for(lambda: _waits(server.newest.get(f"pod-{waiting}")))
    said = server.newest[f"pod-{waiting}"].in_place
    assert said is not None
    taken = Takeover(worker=worker, pod=SPARE)
    server.membership = Membership(restart=said.restarts + 1, own_restarts=1, takeovers=[taken])


def _waits(report: PodReport | None) -> bool:
    return report is not None and report.in_place is not None and not report.ranks


def logs(pods: list[Pod]) -> str:
    return "\n".join(pod.said() for pod in pods)


@pytest.mark.parametrize("lost", [pytest.param(1, marks=pytest.mark.long), 0])
def test_a_spare_replaces_any_lost_pod_and_training_continues_with_the_same_bits(
    lost: int, trio: Pair, whole: dict[str, str], tmp_path: Path
) -> None:
    """Pod 0 hosts the rendezvous."""
    config = trio()
    with serving(tmp_path) as server, training(config, tmp_path / "pods", server, program=PROGRAM) as pods:
        rank_that_trains(pods[1])
        end_at_once(pods[lost])
        give_place(server, lost, waiting=1 - lost)
        alive = [pods[1 - lost], pods[SPARE]]
        assert [pod.wait() for pod in alive] == [0, 0], logs(alive)
    assert last_files(config) == whole
    assert (Path(config.work_directory) / "membership").read_text() == "1.2.0", (
        "the fence excludes commits of the lost pod"
    )
    told = pods[SPARE].message()["inPlace"]
    assert (told["restarts"], told["message"]) == (2, f"began as worker {lost}")


def test_a_pod_that_is_asked_to_stop_loses_no_step(trio: Pair, whole: dict[str, str], tmp_path: Path) -> None:
    """All ranks save together with the stopped pod; then the other pod and the spare continue."""
    config = trio()
    with serving(tmp_path) as server, training(config, tmp_path / "pods", server, program=PROGRAM) as pods:
        rank_that_trains(pods[1])
        pods[1].process.send_signal(signal.SIGTERM)
        assert pods[1].wait() == ExitCode.YIELDED, pods[1].said()
        saved = pods[1].message()["step"]
        give_place(server, 1, waiting=0)
        alive = [pods[0], pods[SPARE]]
        assert [pod.wait() for pod in alive] == [0, 0], logs(alive)
    assert last_files(config) == whole
    assert f"pseudo-{saved:08d}" in pods[0].said(), "training continues from the saved step"


@pytest.mark.long
def test_a_pod_whose_place_was_taken_ends_and_commits_nothing(
    trio: Pair, whole: dict[str, str], tmp_path: Path
) -> None:
    """The replaced pod is alive, as after a network partition, and learns of the takeover once its ranks are gone."""
    config = trio()
    with serving(tmp_path) as server, training(config, tmp_path / "pods", server, program=PROGRAM) as pods:
        rank_that_trains(pods[1])
        taken = Takeover(worker=1, pod=SPARE)
        server.membership = Membership(restart=2, own_restarts=1, takeovers=[taken])
        assert pods[1].wait() == ExitCode.FAILED, pods[1].said()
        alive = [pods[0], pods[SPARE]]
        assert [pod.wait() for pod in alive] == [0, 0], logs(alive)
    assert last_files(config) == whole


@pytest.mark.long
def test_a_spare_replaces_a_pod_whose_rank_hangs_and_training_continues_with_the_same_bits(
    trio: Pair, whole: dict[str, str], tmp_path: Path
) -> None:
    """The rank of pod 1 stands still, and the other rank waits in a collective until the operator's word comes."""
    config = trio()
    with serving(tmp_path) as server, training(config, tmp_path / "pods", server, program=PROGRAM) as pods:
        os.kill(rank_that_trains(pods[1]), signal.SIGSTOP)
        server.wait_for(lambda: _hangs(server.newest.get("pod-1")))
        taken = Takeover(worker=1, pod=SPARE)
        server.membership = Membership(restart=2, own_restarts=1, takeovers=[taken])
        assert pods[1].wait() == ExitCode.FAILED, pods[1].said()
        alive = [pods[0], pods[SPARE]]
        assert [pod.wait() for pod in alive] == [0, 0], logs(alive)
    assert last_files(config) == whole


def _hangs(report: PodReport | None) -> bool:
    return report is not None and any(rank.process == "T" for rank in report.ranks)


def test_a_spare_pod_that_is_asked_to_stop_ends(trio: Pair, tmp_path: Path) -> None:
    with serving(tmp_path) as server, training(trio(), tmp_path / "pods", server, program=PROGRAM) as pods:
        server.wait_for(lambda: server.newest.get(f"pod-{SPARE}"))
        assert server.newest[f"pod-{SPARE}"] == PodReport()
        pods[SPARE].process.terminate()
        assert pods[SPARE].wait() == ExitCode.YIELDED
    assert pods[SPARE].message()["message"] == "a spare pod that was not needed"


def test_the_identity_of_a_pod_follows_from_the_membership(trio: Pair) -> None:
    config = trio()
    assert [initial_identity(config, index) for index in range(3)] == [
        RendezvousIdentity(0, 0, 0, 2),
        RendezvousIdentity(0, 1, 0, 2),
        None,
    ]
    taken = Membership(restart=4, own_restarts=1, takeovers=[Takeover(worker=0, pod=2)])
    assert [identity_in(taken, config, index) for index in range(3)] == [
        None,
        RendezvousIdentity(4, 1, 2, 1, 4),
        RendezvousIdentity(4, 0, 2, 1, 4),
    ]
    again = RendezvousIdentity(4, 1, 2, 1, 4).after_own_restart()
    assert again == RendezvousIdentity(5, 1, 2, 0, 4)
    assert again.after_own_restart() is None


def test_two_pods_that_come_as_one_worker_get_no_group_ranks(trio: Pair) -> None:
    seats = [WorkerDescription(0, "a", None), WorkerDescription(0, "b", None)]
    with pytest.raises(ValueError, match=r"two pods have come as one worker: \[0, 0\]"):
        group_ranks(seats, trio())
