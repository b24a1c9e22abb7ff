"""Two operators, each behind its own proxy: one leads, the other takes over, and only the leader writes."""

import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from tests.integration.operator.chaos.support.faults import Fault, Kind, Target
from tests.integration.operator.chaos.support.lives import Lives
from tests.integration.operator.chaos.support.proxy import Proxy
from tests.support import chart
from tests.support.cluster import Cluster, Job, complete_stage
from tests.support.names import bare_child
from tests.support.operator_process import Operator
from tests.support.patience import PATIENCE_SECONDS, wait_for

pytestmark = pytest.mark.integration

Json = dict[str, Any]

ON_PURPOSE_SECONDS, KILLED_SECONDS = 2.0, 20.0
"""Maximal seconds until the standby works."""


@dataclass
class Replica:
    """An operator behind its proxy."""

    operator: Operator
    proxy: Proxy

    @property
    def leads(self) -> bool:
        return self.operator.metrics()["pseudoreal_leader", frozenset()] == 1

    def works(self, times: int = 1) -> datetime:
        """Return the time of the `times`-th completion of the initial list, after acquiring the Lease."""
        lines = self.operator.lines
        wait_for("the initial list", lambda: len(lines("initial_list_completed")) >= times, self.operator.said)
        return datetime.fromisoformat(lines("initial_list_completed")[times - 1]["timestamp"])


@dataclass
class Pair:
    cluster: Cluster
    first: Replica
    second: Replica

    def start(self) -> None:
        """Start the first replica as leader, and the second as standby."""
        self.first.operator.start()
        self.first.works()
        self.second.operator.start()
        for replica in (self.first, self.second):
            wait_for("its readiness", replica.operator.is_ready, replica.operator.said)
        wait_for("a standby", lambda: self.second.operator.lines("lease_awaited"), self.second.operator.said)

    def created(self) -> Counter[tuple[str, str]]:
        """Count the objects created by both replicas, except events and Leases, by kind and name."""
        made = [e.created for replica in (self.first, self.second) for e in replica.proxy.exchanges if e.created]
        kinds = [(body["kind"], body["metadata"]["name"]) for body in made if body["kind"] not in ("Event", "Lease")]
        return Counter((kind, bare_child(kind, name)) for kind, name in kinds)

    def reported_to(self) -> list[str]:
        """Return the pods selected by the chart's report Service."""
        selector = chart.find(chart.render(), "Service")["spec"]["selector"]
        pods = self.cluster.list("api/v1 pods", ",".join(f"{key}={value}" for key, value in selector.items()))
        return [pod["metadata"]["name"] for pod in pods]


@pytest.fixture
def pair(lives: Lives, tls: Path, cluster: Cluster) -> Iterator[Pair]:
    """Two operators with their pods, not started yet."""
    with ExitStack() as stack:

        def replica(name: str) -> Replica:
            _make_pod(cluster, name)
            proxy = stack.enter_context(Proxy(lives.upstream))
            kubeconfig = proxy.write_kubeconfig(lives.folder / f"{name}.kubeconfig")
            return Replica(Operator(kubeconfig, cluster.namespace, lives.folder / name, tls, name), proxy)

        made = Pair(cluster, replica("first"), replica("second"))
        yield made
        for one in (made.first, made.second):
            if one.operator.is_running:
                one.operator.kill()
            one.operator.check()


def _make_pod(cluster: Cluster, name: str) -> None:
    """Create a pod of the chart's Deployment."""
    labels = chart.find(chart.render(), "Deployment")["spec"]["template"]["metadata"]["labels"]
    container = {"name": "operator", "image": "operator"}
    pod: Any = {"metadata": {"name": name, "labels": labels}, "spec": {"containers": [container]}}
    client.CoreV1Api(cluster.api).create_namespaced_pod(cluster.namespace, pod)


def _seconds(begin: datetime, end: datetime) -> float:
    return (end - begin).total_seconds()


def _takes_reports(operator: Operator) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(operator.report_address.getsockname()) == 0


def test_a_job_succeeds_while_leaders_are_replaced(pair: Pair) -> None:
    """The first leader is stopped, the second one is killed, and the job is not affected."""
    pair.start()
    first, second = pair.first, pair.second
    assert (first.leads, second.leads) == (True, False)
    wait_for("the reports' way", lambda: pair.reported_to() == ["first"], pair.reported_to)
    assert (_takes_reports(first.operator), _takes_reports(second.operator)) == (True, False)
    job = pair.cluster.create("kept")
    job.pods("kept-pseudo-e1")
    assert second.proxy.writes() == [], "who does not lead writes nothing, not even the Lease"

    asked = datetime.now(UTC)
    assert first.operator.stop() == 0
    on_purpose = _seconds(asked, second.works())
    wait_for("the reports' way", lambda: pair.reported_to() == ["second"], pair.reported_to)
    complete_stage(job, "pseudo")
    job.pods("kept-real-delink-e1")

    first.operator.start()
    wait_for("a standby", lambda: len(first.operator.lines("lease_awaited")) == 1, first.operator.said)
    killed = datetime.now(UTC)
    second.operator.kill()
    complete_stage(job, "delink")
    after_death = _seconds(killed, first.works(times=2))
    complete_stage(job, "real")
    wait_for("the end", lambda: job.status.completion_time, lambda: job.status)
    print(f"the standby worked {on_purpose:.2f} s after SIGTERM and {after_death:.2f} s after SIGKILL")
    assert on_purpose < ON_PURPOSE_SECONDS
    assert after_death < KILLED_SECONDS
    _check(pair, job)


def _check(pair: Pair, job: Job) -> None:
    """Check the counts: every object was created once, and every event posted once."""
    assert (job.status.state, job.status.execution, job.status.restarts) == ("Complete", 1, 0)
    jobs = {f"{job.name}-{stage}-e1" for stage in ("pseudo", "real-delink", "real")}
    assert {name for kind, name in pair.created() if kind == "Job"} == jobs
    assert set(pair.created().values()) == {1}
    # Events are told behind the status that they are about.
    wait_for("the last event", lambda: job.reasons()[-1] == "Completed", job.reasons)
    assert [reason for reason, count in Counter(job.reasons()).items() if count > 1] == [
        "PhaseStarted",
        "PhaseCompleted",
    ]


def test_a_leader_that_was_frozen_writes_nothing_after_it_lost_the_lease(pair: Pair) -> None:
    """The leader is frozen while it waits for the last answer before a write, and receives the answer after it
    wakes."""
    pair.start()
    first, second = pair.first, pair.second
    first.operator.expected = "lease_lost"
    first.proxy.holds = "/pods"
    job = pair.cluster.create("frozen")
    wait_for("a pass", lambda: first.proxy.holding, first.operator.said)
    assert first.operator.process
    first.operator.process.send_signal(signal.SIGSTOP)
    second.works()
    job.pods("frozen-pseudo-e1")
    # What it had sent before has arrived by now.
    begin = len(first.proxy.exchanges)
    first.proxy.release()
    first.operator.process.send_signal(signal.SIGCONT)
    assert first.operator.process.wait(PATIENCE_SECONDS) == 1
    assert first.proxy.writes(begin) == []
    (lost,) = first.operator.lines("lease_lost")
    assert lost["error"] == "another operator took the lease"
    refused = [line["error"] for line in first.operator.lines("pass_failed")]
    assert any("does not hold the Lease" in error for error in refused), "it wanted to write"
    complete_stage(job, "pseudo")
    assert set(pair.created().values()) == {1}


def test_a_leader_finishes_its_writes_before_it_exits(pair: Pair) -> None:
    """The Lease is released only after the last write has been answered."""
    pair.start()
    first, second = pair.first, pair.second
    # The Jobs of three stages are tried before anything is made.
    first.proxy.inject(Fault(Kind.DELAY, Target.CHILD, first.proxy.counts[Target.CHILD] + 4))
    job = pair.cluster.create("finished")
    wait_for("a write under way", lambda: first.proxy.struck, first.operator.said)
    assert first.operator.stop() == 0
    assert first.operator.lines("lease_released")
    assert first.proxy.struck in map(str, (e for e in first.proxy.exchanges if e.created))
    second.works()
    complete_stage(job, "pseudo")
    job.pods("finished-real-delink-e1")
    exchanges = [*first.proxy.exchanges, *second.proxy.exchanges]
    assert [str(e) for e in exchanges if e.status == 409] == [], "nobody came late"
    assert set(pair.created().values()) == {1}


def test_a_leader_pauses_while_the_api_server_is_down(pair: Pair) -> None:
    """The leader goes on after the outage, although its lease duration has passed: no other replica led in between."""
    leader = pair.first
    leader.operator.start()
    leader.works()
    wait_for("its readiness", leader.operator.is_ready, leader.operator.said)
    leader.proxy.is_away = True
    missed = leader.operator.lines
    wait_for("the end of its time", lambda: [one for one in missed("lease_renewal_failed") if not one["may_write"]])
    job = pair.cluster.create("paused")
    assert leader.operator.health()["dead_tasks"] == []
    leader.proxy.is_away = False
    complete_stage(job, "pseudo")
    assert leader.operator.is_running
    assert not missed("pass_failed"), "it does not try what cannot succeed"
    assert len(leader.operator.lines("lease_acquired")) == 1
