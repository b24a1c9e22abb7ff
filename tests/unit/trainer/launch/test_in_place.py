"""Two pods whose ranks are restarted in place, as real processes that meet on the loopback interface."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.messages import InPlace
from pseudoreal_api.wire.reports import REPORT_URL
from pseudoreal_trainer.heartbeat.record import HeartbeatRecord, read_heartbeat
from pseudoreal_trainer.pod.heartbeats import process_state
from pseudoreal_trainer.pod.pod_folder import PodFolder

from tests.support.patience import wait_for
from tests.support.pods import Pod, meeting, start_pod
from tests.support.ports import free_ports
from tests.unit.trainer.pod.faulty_worker import FAULTS
from tests.unit.trainer.pod.pod_program import AUTHORITY, TOKEN
from tests.unit.trainer.pod.server import Server, serving

STEPS = 300
KILLED_AT = 12


@pytest.fixture
def pair(job_body: dict[str, Any], config: Any) -> Callable[..., PhaseConfig]:
    """Makes the configuration of a phase on two pods."""
    phase = job_body["spec"]["phases"][0]
    phase |= {"workers": 2, "processesPerWorker": 1, "until": {"step": STEPS}}

    def make(work: str = "work", in_place: int = 2) -> PhaseConfig:
        made: PhaseConfig = config(0, work).model_copy(update={"in_place": in_place})
        return made

    return make


@contextmanager
def training(config: PhaseConfig, folder: Path, server: Server | None = None, **more: Any) -> Iterator[list[Pod]]:
    """The pods of worker 0 and 1; they and their ranks end with the context."""
    folder.mkdir(exist_ok=True)
    (port, *_) = free_ports(4)
    pods = []
    for number in (0, 1):
        place = folder / str(number)
        environment = meeting(number, port) | {"PSEUDOREAL_OUTCOME_DIRECTORY": str(place / "outcomes")}
        environment |= _reporting(server, number, folder) if server else {}
        pods.append(start_pod(config, place, number, 2, environment=environment, **more))
    try:
        yield pods
    finally:
        for pod in pods:
            with suppress(ProcessLookupError):
                os.killpg(pod.process.pid, signal.SIGKILL)
            pod.process.wait()
        for record in (record for pod in pods for record in ranks(pod)):
            with suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)


def _reporting(server: Server, number: int, folder: Path) -> dict[str, str]:
    endpoint = server.endpoint(f"pod-{number}")
    return {
        REPORT_URL: endpoint.url,
        TOKEN: str(endpoint.token),
        AUTHORITY: str(endpoint.authority),
        FAULTS: str(folder),
    }


def ranks(pod: Pod) -> list[HeartbeatRecord]:
    return [found for found in map(read_heartbeat, PodFolder(pod.folder / "outcomes").heartbeats()) if found]


def rank_that_trains(pod: Pod, step: int = KILLED_AT, but: int = 0) -> int:
    """The process of the pod's rank once it is at the step; not the process `but`."""

    def there() -> int:
        assert pod.process.poll() is None, pod.said()
        return next((record.pid for record in ranks(pod) if record.step >= step and record.pid != but), 0)

    return wait_for(f"step {step}", there, pod.said, pause=0.005)


def last_files(config: PhaseConfig) -> dict[str, str]:
    """SHA-256 of the files of the checkpoint at the end of the phase: weights and moments of every rank."""
    folder = Path(config.work_directory) / "checkpoints" / f"pseudo-{STEPS:08d}"
    manifest = json.loads((folder / "manifest.json").read_text())
    return {name: file["sha256"] for name, file in manifest["files"].items()}


def test_killed_ranks_are_restarted_in_place_and_the_weights_are_those_of_an_undisturbed_run(
    pair: Callable[..., PhaseConfig], tmp_path: Path
) -> None:
    disturbed, whole = pair("disturbed"), pair("whole")
    with training(whole, tmp_path / "pods-whole") as pods:
        assert [pod.wait() for pod in pods] == [0, 0], pods[0].said()
    with training(disturbed, tmp_path / "pods") as pods:
        before = [rank_that_trains(pod) for pod in pods]
        os.kill(before[1], signal.SIGKILL)
        again = rank_that_trains(pods[0], but=before[0])
        assert process_state(before[0]) in ("X", "Z"), "the rank before has ended"
        os.kill(again, signal.SIGKILL)
        assert [pod.wait() for pod in pods] == [0, 0], "\n".join(pod.said() for pod in pods)
    assert last_files(disturbed) == last_files(whole)
    told = [InPlace.model_validate(pod.message()["inPlace"]) for pod in pods]
    assert [(each.restarts, each.peer_lost) for each in told] == [(2, False), (2, True)]
    assert told[0].message.startswith("local rank 0 ended without a word")
    assert pods[0].said().count('"ranks_restart_in_place"') == 2


@pytest.mark.long
def test_a_pod_whose_partner_is_gone_ends_when_they_have_not_met(
    pair: Callable[..., PhaseConfig], tmp_path: Path
) -> None:
    """Its last word is that of its end, and there was no restart."""
    program = ("-m", "tests.unit.trainer.launch.impatient_pod")
    with training(pair(), tmp_path / "pods", program=program) as pods:
        lost = rank_that_trains(pods[0])
        os.killpg(pods[0].process.pid, signal.SIGKILL)
        os.kill(lost, signal.SIGKILL)
        assert pods[1].wait() == 1
    message, said = pods[1].message(), pods[1].said()
    assert message["peerLost"]
    assert "inPlace" not in message
    assert said.count('"pods_have_not_met"') == 1


def test_a_partner_that_notices_nothing_hears_of_it_from_the_operator(
    pair: Callable[..., PhaseConfig], tmp_path: Path
) -> None:
    program = ("-m", "tests.unit.trainer.pod.pod_program")
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
