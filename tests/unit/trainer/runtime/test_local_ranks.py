"""A pod ends its remaining ranks once one is gone, because they would wait for it."""

import os
import signal
import subprocess
from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.wire.messages import Outcome, TerminationMessage
from pseudoreal_trainer.runtime.heartbeat import HeartbeatFile
from pseudoreal_trainer.runtime.pod_folder import PodFolder
from pseudoreal_trainer.runtime.ranks import LAST_SECONDS, LocalRanks
from pseudoreal_trainer.runtime.termination import write_outcome

from tests.support.patience import wait_for
from tests.unit.trainer.runtime.support.reporting_pod import heartbeats_of, reporting_pod
from tests.unit.trainer.runtime.support.server import serving

RANKS = 3


class Pod:
    """Idle processes, each with the heartbeat file of a rank."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 100.0
        self.ranks = [subprocess.Popen(["sleep", "1000"]) for _ in range(RANKS)]
        for number, process in enumerate(self.ranks):
            file = HeartbeatFile(PodFolder(folder).heartbeat(number), process.pid, number)
            file.write("computing", "a step", 0.0, 1, nan, nan)
        self.local_ranks = LocalRanks(PodFolder(folder), lambda: self.now)

    def end(self, number: int, outcome: Outcome | None) -> None:
        """End a rank with this outcome; None means without any outcome."""
        if outcome is not None:
            write_outcome(self.folder, number, TerminationMessage(outcome=outcome, phase="real", execution=1))
        self.ranks[number].kill()
        self.ranks[number].wait()

    def check(self) -> set[int]:
        """Run one check; return the ranks that are dead afterwards."""
        self.local_ranks.check()
        for number in self.local_ranks.killed:
            self.ranks[number].wait(60)
        return {number for number, process in enumerate(self.ranks) if process.poll() is not None}


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    found = Pod(tmp_path)
    yield found
    for process in found.ranks:
        process.kill()
        process.wait()


@pytest.mark.parametrize("outcome", [None, "Failed", "InvalidJob", "OutOfMemory"])
def test_remaining_ranks_have_time_to_write_their_outcomes_before_they_are_killed(
    pod: Pod, outcome: Outcome | None
) -> None:
    assert pod.check() == set()
    pod.end(1, outcome)
    assert pod.check() == {1}
    pod.now += LAST_SECONDS - 0.1
    assert pod.check() == {1}
    pod.now += 0.1
    assert pod.check() == {0, 1, 2}
    assert pod.local_ranks.killed == {0, 2}


@pytest.mark.parametrize("outcome", ["Yielded", "Succeeded"])
def test_ranks_live_on_after_a_rank_of_their_pod_has_succeeded(pod: Pod, outcome: Outcome) -> None:
    pod.end(1, outcome)
    for _ in range(3):
        assert pod.check() == {1}
        pod.now += 10 * LAST_SECONDS


def test_all_ranks_of_a_pod_are_killed_when_another_pod_restarts_in_place(pod: Pod) -> None:
    assert not pod.local_ranks.are_dead()
    pod.local_ranks.kill_all("another pod starts anew")
    assert pod.check() == {0, 1, 2}
    assert pod.local_ranks.are_dead()


def test_a_rank_without_a_heartbeat_does_not_count_as_dead(tmp_path: Path) -> None:
    now = [0.0]
    local_ranks = LocalRanks(PodFolder(tmp_path), lambda: now[0])
    local_ranks.check()
    PodFolder(tmp_path).heartbeat(0).touch()
    now[0] = 10.0
    local_ranks.check()
    assert local_ranks.killed == set()


def test_a_pod_with_a_killed_rank_ends_although_another_rank_is_stuck(
    job_body: dict[str, Any], config: Any, tmp_path: Path
) -> None:
    """torchrun would wait half a minute for the stuck rank, and the pod could not tell which rank was killed."""
    phase = job_body["spec"]["phases"][0]
    phase |= {"workers": 1, "processesPerWorker": 2, "until": {"step": 10**6}, "batch": {"sequences": 6}}
    with serving(tmp_path) as server, reporting_pod(config(0), server, tmp_path) as found:

        def trains() -> bool:
            records = heartbeats_of(found)
            return len(records) == 2 and all(record.step > 0 for record in records)

        wait_for("the first steps", trains, found.said)
        pids = [record.pid for record in heartbeats_of(found)]
        os.kill(pids[0], signal.SIGSTOP)
        os.kill(pids[1], signal.SIGKILL)
        assert found.wait() == 1
        assert '"rank_ended"' in found.said()
    message = found.message()
    assert message["message"].startswith("local rank 1 ended without a message")
    assert not message["peerLost"]
