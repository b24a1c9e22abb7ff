"""Output of `kubectl describe` in common situations, compared with reviewed golden files. After a change,
RENEW_GOLDEN=1 writes them again."""

import difflib
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kubernetes import client
from pseudoreal_api.wire.messages import InPlace
from pseudoreal_api.wire.reports import PodReport
from pseudoreal_dev.machine import paths

from tests.integration.operator.support.endpoint import Reporter, progress, sign
from tests.support.cluster import Cluster, Job, complete_stage
from tests.support.installed import make_namespace
from tests.support.kubectl import Kubectl
from tests.support.names import bare
from tests.support.operator_process import Operator
from tests.support.patience import wait_for

pytestmark = pytest.mark.integration

FOLDER = paths.REPOSITORY / "tests" / "data" / "golden" / "describe"
AT_A_TIME = 6
PATIENT = {"spec__restart": {"backoffSeconds": 3000, "maxRestarts": 1}}
NO_RESTART = {"spec__restart": {"maxRestarts": 0}}

Situation = Callable[[Cluster], Job]
SITUATIONS: dict[str, Situation] = {}


def situation(arrange: Situation) -> Situation:
    """Register a situation: a function for creating a job and bringing it into a stable state."""
    SITUATIONS[arrange.__name__.replace("_", "-")] = arrange
    return arrange


def _job(cluster: Cluster, **changes: object) -> Job:
    return cluster.create("llm", **changes)


@situation
def healthy(cluster: Cluster) -> Job:
    job = _job(cluster)
    complete_stage(job, "pseudo")
    complete_stage(job, "delink")
    job.run("llm-real-e1", 2)
    return job


@situation
def restarted_in_place(cluster: Cluster) -> Job:
    job = _job(cluster, spec__phases__0__workers=2)
    died = InPlace(
        restarts=1, peer_lost=False, message="local rank 0 ended without a message, as a killed process does"
    )
    followed = InPlace(restarts=1, peer_lost=True, message="Connection closed by peer")
    for rank, (pod, said) in enumerate(zip(job.run("llm-pseudo-e1", 2), (followed, died), strict=True)):
        Reporter.of(cluster, pod).tell(PodReport(ranks=[sign(rank, 5)], in_place=said))
    return job


@situation
def unschedulable(cluster: Cluster) -> Job:
    job = _job(cluster)
    (pod,) = job.pods("llm-pseudo-e1")
    says = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": says}
    cluster.patch_pod_status(pod["metadata"]["name"], {"conditions": [condition]})
    return job


@situation
def quota_pending(cluster: Cluster) -> Job:
    cluster.set_quota({"count/jobs.batch": "0"})
    return _job(cluster)


@situation
def image_missing(cluster: Cluster) -> Job:
    job = _job(cluster, spec__pod={"image": "registry.example/no-such:1"})
    (pod,) = job.pods("llm-pseudo-e1")
    says = 'Back-off pulling image "registry.example/no-such:1": not found'
    job.keep_waiting(pod, {"reason": "ImagePullBackOff", "message": says})
    return job


@situation
def out_of_memory(cluster: Cluster) -> Job:
    job = _job(cluster, **PATIENT, spec__phases__0__resources={"limits": {"memory": "2Gi"}})
    (pod,) = job.run("llm-pseudo-e1")
    job.end(pod, exit_code=137, reason="OOMKilled")
    return job


@situation
def config_error(cluster: Cluster) -> Job:
    job = _job(cluster)
    (pod,) = job.run("llm-pseudo-e1")
    job.end(pod, "InvalidJob", message="spec.data.path corpus does not exist in the pod; mount it by spec.data.volume")
    return job


@situation
def hang(cluster: Cluster) -> Job:
    phase = {"spec__phases__0__workers": 2, "spec__hang": {"stepSeconds": 2, "action": "Report"}}
    job = _job(cluster, **phase)
    pods = job.run("llm-pseudo-e1", 2)
    job.bind(pods[1], "node-17")
    says = [PodReport(ranks=[sign(0, 3, "waiting")], progress=progress(3)), PodReport(ranks=[sign(1, 3)])]
    for pod, report in zip(pods, says, strict=True):
        Reporter.of(cluster, pod).tell(report)
    return job


@situation
def node_lost(cluster: Cluster) -> Job:
    job = _job(cluster, **PATIENT)
    job.bind(job.pods("llm-pseudo-e1")[0], "node-17")
    (pod,) = job.run("llm-pseudo-e1")
    why = "Taint manager: deleting due to NoExecute taint"
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": why}
    cluster.patch_pod_status(pod["metadata"]["name"], {"phase": "Failed", "conditions": [condition]})
    return job


@situation
def delink_failed(cluster: Cluster) -> Job:
    job = _job(cluster, **NO_RESTART)
    complete_stage(job, "pseudo")
    (pod,) = job.run("llm-real-delink-e1")
    job.end(pod, "Failed", message="checkpoint pseudo-10: a file has another SHA-256 than its manifest")
    return job


@situation
def restarts_exhausted(cluster: Cluster) -> Job:
    job = _job(cluster, spec__restart={"backoffSeconds": 0, "maxRestarts": 1})
    for execution in (1, 2):
        (pod,) = job.run(f"llm-pseudo-e{execution}")
        job.end(pod, "Failed", message="RuntimeError: NCCL error: unhandled system error")
    return job


@situation
def suspended(cluster: Cluster) -> Job:
    job = _job(cluster)
    complete_stage(job, "pseudo")
    job.run("llm-real-delink-e1")
    job.wait("the delink", lambda status: status.phases[1].state == "Delinking")
    job.suspend(True)
    wait_for("the end of the pods", lambda: not job.alive_pods(), lambda: job.status)
    return job


@situation
def succeeded(cluster: Cluster) -> Job:
    job = _job(cluster)
    for stage in ("pseudo", "delink", "real"):
        complete_stage(job, stage)
    return job


@pytest.fixture(scope="module")
def jobs(admin: client.ApiClient, operator_of_all: Operator) -> Iterator[dict[str, Job]]:
    """Situation name -> its job, each in its own namespace. All situations are arranged in parallel."""
    begin = len(operator_of_all.said())
    clusters = {name: make_namespace(admin, f"describe-{name}") for name in SITUATIONS}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        arranged = [*pool.map(lambda name: SITUATIONS[name](clusters[name]), clusters)]
    yield dict(zip(clusters, arranged, strict=True))
    for cluster in clusters.values():
        cluster.delete_jobs()
    operator_of_all.check(begin)


@pytest.mark.parametrize("name", sorted(SITUATIONS))
def test_kubectl_describe_shows_state_and_remedy(name: str, jobs: dict[str, Job], kubectl: Kubectl) -> None:
    job, path = jobs[name], FOLDER / f"{name}.txt"
    if os.environ.get("RENEW_GOLDEN"):
        _renew(path, lambda: described(job, kubectl))
    golden = path.read_text()

    def difference() -> str:
        before, after = (text.splitlines() for text in (golden, described(job, kubectl)))
        return "\n".join(difflib.unified_diff(before, after, "golden", "described", lineterm=""))

    wait_for("the description", lambda: not difference(), difference)


def described(job: Job, kubectl: Kubectl) -> str:
    """Return the text after the spec, without parts differing between runs."""
    text = kubectl.said("-n", job.cluster.namespace, "describe", "prj", job.name)
    status = bare(text.partition("\nStatus:")[2])
    status = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "(time)", status)
    status = re.sub(r"(llm-[a-z0-9-]*-e\d+-\d+)-[a-z0-9]{5}\b", r"\1-xxxxx", status)
    status = re.sub(r"(continueFrom: llm)-[0-9a-f]{8}\b", r"\1-xxxxxxxx", status)
    status = re.sub(r"(?m)^(  (?:Normal|Warning) +\S+) +\S+ +", r"\1  (age)  ", status)
    # Ages of two to five characters make the column of ages wider or narrower.
    status = re.sub(r"(?m)^  (?:Type|----) .*", lambda head: re.sub(r"(?<=\S) +", "  ", head[0]), status)
    return status.replace(job.cluster.namespace, "default")


def _renew(path: Path, describe: Callable[[], str]) -> None:
    """Write the golden file once the description is stable."""
    seen: list[str] = []

    def at_rest() -> bool:
        seen.append(describe())
        return len(seen) > 8 and len(set(seen[-8:])) == 1

    wait_for("rest", at_rest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(seen[-1])
