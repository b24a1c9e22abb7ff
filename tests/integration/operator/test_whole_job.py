"""A whole job on a real API server, with an undisturbed operator and with a repeatedly killed one."""

from base64 import b64decode
from collections.abc import Callable

import pytest

from tests.support.cluster import Cluster, complete_stage
from tests.support.operator_process import Operator

pytestmark = [pytest.mark.integration, pytest.mark.minors]

STORY = [
    "Accepted",
    "PhaseStarted",
    "PhaseCompleted",
    "DelinkStarted",
    "DelinkCompleted",
    "PhaseStarted",
    "PhaseCompleted",
    "Completed",
]


@pytest.mark.usefixtures("shared_operator")
def test_a_job_runs_through_its_phases(cluster: Cluster) -> None:
    job = cluster.create("whole")
    complete_stage(job, "pseudo")
    job.pods("whole-real-delink-e1")
    assert job.wait("the delink", lambda status: status.state == "Delinking").phases[0].state == "Complete"
    complete_stage(job, "delink")
    assert cluster.list("api/v1 secrets") == [], "one worker alone meets nobody"
    job.run("whole-real-e1", 2)
    (secret,) = cluster.list("api/v1 secrets")
    assert (len(b64decode(secret["data"]["secret"])), secret["immutable"]) == (32, True)
    status = job.wait("both workers", lambda status: status.replicas.ready == 2)
    assert (status.current_phase, status.phases[1].start_checkpoint) == ("real", "real-10")
    complete_stage(job, "real")
    status = job.wait("the end", lambda status: status.state == "Complete")
    assert (status.execution, status.restarts) == (1, 0)
    assert [(p.name, p.state, p.step, p.loss, p.validation_loss, p.end_checkpoint) for p in status.phases] == [
        ("pseudo", "Complete", 10, "4.2500", "4.5000", "pseudo-10"),
        ("real", "Complete", 20, "3.2500", "3.5000", "real-20"),
    ]
    assert status.progress
    assert (status.progress.step, status.progress.percent) == (20, 100)
    assert job.condition("Complete")["status"] == "True"
    assert job.condition("Delinked")["status"] == "True"
    job.tells(*STORY)


def test_killing_the_operator_in_each_stage_changes_nothing(
    cluster: Cluster, restart_operator: Callable[[], None]
) -> None:
    job = cluster.create("immortal")
    for stage, child, workers in (("pseudo", "pseudo", 1), ("delink", "real-delink", 1), ("real", "real", 2)):
        job.run(f"immortal-{child}-e1", workers)
        restart_operator()
        complete_stage(job, stage)
        restart_operator()
    status = job.wait("the end", lambda status: status.state == "Complete")
    assert (status.execution, status.restarts) == (1, 0)
    assert job.child_jobs() == ["immortal-pseudo-e1", "immortal-real-delink-e1", "immortal-real-e1"]
    job.event("Completed")
    told = iter(STORY)
    assert all(reason in told for reason in job.reasons()), "some may be lost with an operator; none comes twice"


def test_the_operator_program_ends_at_sigterm(cluster: Cluster, stopped_operator: Operator) -> None:
    operator = stopped_operator
    operator.is_program = True
    operator.start()
    job = cluster.create("calm")
    job.pods("calm-pseudo-e1")
    assert operator.stop() == 0
