"""Jobs with a killed rank: the rank's pod is blamed, whichever pod ended first."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.depth import DEPTH

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("shared_operator")]

Json = dict[str, Any]
TRIALS = DEPTH.of(2, 8)
"""Trials for each order, and for each of the two workers."""
LOST = (
    "RuntimeError: [/src/gloo/transport/tcp/pair.cc:561] Connection closed by peer [10.244.0.16]:57487. Check the logs"
    " of the remote worker before reporting an error. GLHF! 🏖️"
)
KILLED = "local rank 0 ended without a message, as a killed process does; another rank then said: " + LOST


class Trial:
    def __init__(self, cluster: Cluster, victim: int, number: int) -> None:
        name = f"killed-{victim}-{number}"
        self.job = cluster.create(name, spec__phases__0__workers=2, spec__restart={"backoffSeconds": 0})
        self._victim = victim

    def begin(self) -> None:
        pods = self.job.run(f"{self.job.name}-pseudo-e1", 2)
        self.victim, self.peer = pods[self._victim], pods[1 - self._victim]

    def kill(self) -> None:
        self.job.end(self.victim, "Failed", message=KILLED)

    def kill_without_a_word(self) -> None:
        self.job.end(self.victim, exit_code=137)

    def lose_peer(self) -> None:
        self.job.end(self.peer, "Failed", message=LOST, peer_lost=True)

    def await_ending(self) -> None:
        """Wait until the operator has seen the end of one pod."""
        self.job.wait("the end of one", lambda status: any(c.reason == "Ending" for c in status.conditions))


ORDERS: list[list[Callable[[Trial], None]]] = [
    [Trial.kill, Trial.lose_peer],
    [Trial.lose_peer, Trial.kill],
    [Trial.lose_peer, Trial.await_ending, Trial.kill],
    [Trial.lose_peer, Trial.await_ending, Trial.kill_without_a_word],
    [Trial.kill],
]
"""Orders of events. In the last one, the peer notices nothing, and the operator ends it."""


def test_the_worker_with_the_first_failure_is_named(cluster: Cluster) -> None:
    cases = list(product(range(TRIALS), ORDERS, (0, 1)))
    DEPTH.chance("orders").shuffle(cases)
    trials = [Trial(cluster, victim, number) for number, (_, _, victim) in enumerate(cases)]
    for trial in trials:
        trial.begin()
    for trial, (_, order, _) in zip(trials, cases, strict=True):
        for act in order:
            act(trial)
    for trial in trials:
        _check(trial)


def _check(trial: Trial) -> None:
    job, name = trial.job, trial.victim["metadata"]["name"]
    status = job.wait("the verdict", lambda status: bool(status.faults))
    assert [(fault.pod, fault.reason, fault.execution) for fault in status.faults] == [(name, "PodFailed", 1)], job.name
    assert status.restarts == 1
    failed = job.event("ExecutionFailed")
    assert failed["message"].startswith(f"Pod {name} "), failed["message"]
    job.pods(f"{job.name}-pseudo-e2", 2)
