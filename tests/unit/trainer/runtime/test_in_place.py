"""Two pods whose ranks are restarted in place, as real processes with a rendezvous on loopback."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.messages import InPlace
from pseudoreal_trainer.runtime.heartbeat import process_state

from tests.support.patience import wait_for
from tests.support.ports import free_ports
from tests.unit.trainer.runtime.support.pods import last_files, rank_that_trains, stranger_at, training
from tests.unit.trainer.runtime.support.server import serving


def test_killed_ranks_are_restarted_in_place_and_the_weights_are_those_of_an_undisturbed_run(
    pair: Callable[..., PhaseConfig], tmp_path: Path
) -> None:
    """A stranger disturbs every rendezvous."""
    disturbed, whole = pair("disturbed"), pair("whole")
    with training(whole, tmp_path / "pods-whole") as pods:
        assert [pod.wait() for pod in pods] == [0, 0], pods[0].said()
    ports = free_ports(4)
    with stranger_at(ports), training(disturbed, tmp_path / "pods", ports=ports) as pods:
        before = [rank_that_trains(pod) for pod in pods]
        os.kill(before[1], signal.SIGKILL)
        again = rank_that_trains(pods[0], but=before[0])
        assert process_state(before[0]) in ("X", "Z"), "the previous rank has ended"
        os.kill(again, signal.SIGKILL)
        assert [pod.wait() for pod in pods] == [0, 0], "\n".join(pod.said() for pod in pods)
    assert last_files(disturbed) == last_files(whole)
    no_place_was_taken = not (Path(disturbed.work_directory) / "membership").exists()
    assert no_place_was_taken, (
        "without a takeover no membership is recorded: Kueue may replace the pods, and new pods start with restart 0"
    )
    told = [InPlace.model_validate(pod.message()["inPlace"]) for pod in pods]
    assert [(each.restarts, each.peer_lost) for each in told] == [(2, False), (2, True)]
    assert told[0].message.startswith("local rank 0 ended without a message")
    assert pods[0].said().count('"ranks_restart_in_place"') == 2
    assert "stranger_refused" in pods[0].said()


@pytest.mark.long
def test_a_pod_ends_if_its_lost_peer_does_not_come_to_the_rendezvous_in_time(
    pair: Callable[..., PhaseConfig], tmp_path: Path
) -> None:
    """The termination message is the one from before the restart, which does not count."""
    program = ("-m", "tests.unit.trainer.runtime.support.impatient_pod")
    with training(pair(), tmp_path / "pods", program=program) as pods:
        lost = rank_that_trains(pods[0])
        os.killpg(pods[0].process.pid, signal.SIGKILL)
        os.kill(lost, signal.SIGKILL)
        assert pods[1].wait() == 1
    message, said = pods[1].message(), pods[1].said()
    assert message["peerLost"]
    assert "inPlace" not in message
    assert said.count('"pods_have_not_met"') == 1


def test_a_pod_that_noticed_nothing_restarts_after_an_answer_of_the_operator(
    pair: Callable[..., PhaseConfig], tmp_path: Path
) -> None:
    program = ("-m", "tests.unit.trainer.runtime.support.pod_program")
    with serving(tmp_path) as server, training(pair(), tmp_path / "pods", server, program=program) as pods:
        before = [rank_that_trains(pod) for pod in pods]
        os.kill(before[0], signal.SIGSTOP)
        os.kill(before[1], signal.SIGKILL)
        assert [pod.wait() for pod in pods] == [0, 0], "\n".join(pod.said() for pod in pods)
    told = [pod.message()["inPlace"] for pod in pods]
    assert [(each["restarts"], each["peerLost"]) for each in told] == [(1, True), (1, False)]
    assert "another pod restarts its ranks in place" in pods[0].said()


def test_a_pod_that_is_asked_to_stop_while_it_waits_for_the_others_ends(
    pair: Callable[..., PhaseConfig], tmp_path: Path
) -> None:
    with training(pair(), tmp_path / "pods") as pods:
        lost = rank_that_trains(pods[0])
        os.killpg(pods[0].process.pid, signal.SIGKILL)
        os.kill(lost, signal.SIGKILL)
        wait_for("the restart", lambda: '"ranks_restart_in_place"' in pods[1].said(), pods[1].said)
        pods[1].process.terminate()
        assert pods[1].wait(20) == 1
    assert pods[1].message()["peerLost"]
