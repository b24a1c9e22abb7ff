"""An elastic phase goes on with its scheduled pods, and gets all of its pods back, without a counted restart."""

import json
from typing import Any

import pytest
from pseudoreal_api.names import CONFIG_FILE, file_annotation

from tests.support.cluster import Cluster, Job

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("shared_operator")]

Json = dict[str, Any]
# More workers are tried ten times as long after that.
ELASTIC = {"spec__phases__0__workers": 2, "spec__phases__0__elastic": {"minWorkers": 1, "patienceSeconds": 1}}


def test_a_phase_has_as_many_workers_as_there_are_nodes(cluster: Cluster) -> None:
    job = cluster.create("elastic", **ELASTIC)
    first, other = job.pods("elastic-pseudo-e1", 2)
    assert [size(first), size(other)] == [(2, 2), (2, 2)]
    run(job, first)
    status = job.wait("fewer workers", lambda status: status.execution == 2)
    assert status.elastic
    assert (status.elastic.workers, status.elastic.message) == (1, "1 of 2 pods had a node after 1 s.")
    # As SIGTERM has it save, and end.
    job.end(first, "Yielded", checkpoint="pseudo-1", digest="0" * 64, step=1)
    (alone,) = job.pods("elastic-pseudo-e2")
    assert size(alone) == (1, 4)
    run(job, alone)
    job.wait("one worker that trains", lambda status: (status.replicas.desired, status.replicas.ready) == (1, 1))
    assert "It has 1 of 2 workers" in job.condition("Progressing")["message"]
    job.wait("another try", lambda status: status.execution == 3)
    job.end(alone, "Yielded", checkpoint="pseudo-2", digest="0" * 64, step=2)
    for pod in job.pods("elastic-pseudo-e3", 2):
        assert size(pod) == (2, 2)
        run(job, pod)
    status = job.wait("all workers", lambda status: status.replicas.ready == 2)
    assert (status.elastic, status.restarts, status.retries, status.faults) == (None, 0, None, [])
    job.tells("Accepted", "PhaseStarted", *["Resized", "RestartStarted"] * 2)


def run(job: Job, pod: Json) -> None:
    job.bind(pod, f"node-of-{pod['metadata']['name']}")
    job.start(pod)


def size(pod: Json) -> tuple[int, int]:
    """Return the numbers of workers and micro-batches in the pod's configuration."""
    told = json.loads(pod["metadata"]["annotations"][file_annotation(CONFIG_FILE)])
    return told["workers"], told["batch"]["microBatches"]
