"""The API server from a test's point of view: as a user applying jobs, and as a kubelet running pods."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kubernetes import client
from pseudoreal_api.base import GROUP, PLURAL, VERSION
from pseudoreal_api.names import CONTAINER, LABEL_JOB, LABEL_PHASE
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_api.wire.messages import EXIT_CODES, Outcome, TerminationMessage
from pseudoreal_api.wire.reports import REPORT_AUDIENCE

from tests.support.jobs import good_job
from tests.support.names import bare
from tests.support.patience import wait_for

Json = dict[str, Any]

CHILD_PATHS = ("api/v1 services", "apis/networking.k8s.io/v1 networkpolicies", "apis/batch/v1 jobs", "api/v1 pods")
"""API paths of a job's children; the pods come last."""


@dataclass(frozen=True)
class Cluster:
    """One namespace of the API server."""

    api: client.ApiClient
    namespace: str

    def create(self, name: str, **changes: Any) -> "Job":
        self._custom.create_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, good_job(name, **changes))
        return Job(self, name)

    def find(self, name: str) -> Json | None:
        try:
            found: Any = self._custom.get_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, name)
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise
        return dict(found)

    def list(self, path: str, selector: str = "") -> "list[Json]":
        """Return the objects at a path such as "api/v1 pods"."""
        version, plural = path.split()
        found: Any = self._get(f"/{version}/namespaces/{self.namespace}/{plural}", selector)
        return [*found["items"]]

    def patch_job(self, name: str, patch: Any) -> None:
        self._custom.patch_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, name, patch)

    def patch_status(self, name: str, status: Json) -> None:
        self._custom.patch_namespaced_custom_object_status(
            GROUP, VERSION, self.namespace, PLURAL, name, {"status": status}
        )

    def delete_job(self, name: str) -> None:
        self._custom.delete_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, name)

    def delete_jobs(self) -> None:
        """Delete all jobs of the namespace, without waiting for the deletion of their children."""
        self._custom.delete_collection_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL)

    def patch_pod_status(self, name: str, status: Json) -> None:
        client.CoreV1Api(self.api).patch_namespaced_pod_status(name, self.namespace, {"status": status})

    def delete_pod(self, name: str) -> None:
        client.CoreV1Api(self.api).delete_namespaced_pod(name, self.namespace)

    def token(self, pod: Json | None, audience: str = REPORT_AUDIENCE) -> str:
        """Return a service account token: bound to the pod, like a token projected by the kubelet; without a pod,
        unbound."""
        spec: Json = {"audiences": [audience], "expirationSeconds": 600}
        if pod:
            name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}
        wish: Any = {"spec": spec}
        made = client.CoreV1Api(self.api).create_namespaced_service_account_token("default", self.namespace, wish)
        assert made.status
        return str(made.status.token)

    def delete_child_job(self, name: str) -> None:
        """Delete the child Job with this bare name (see `bare`)."""
        found = self._child_job(name)
        client.BatchV1Api(self.api).delete_namespaced_job(found, self.namespace, propagation_policy="Background")

    def hold_child_job(self, name: str, hold: bool) -> None:
        """Suspend or admit a child Job, as a queue controller does."""
        found, patch = self._child_job(name), {"spec": {"suspend": hold}}
        client.BatchV1Api(self.api).patch_namespaced_job(found, self.namespace, patch)

    def _child_job(self, name: str) -> str:
        names = [job["metadata"]["name"] for job in self.list("apis/batch/v1 jobs")]
        (found,) = [known for known in names if bare(known) == name]
        return str(found)

    def set_quota(self, hard: dict[str, str]) -> None:
        quota: Any = {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "quota"},
            "spec": {"hard": hard},
        }
        core = client.CoreV1Api(self.api)
        if core.list_namespaced_resource_quota(self.namespace).items:
            core.patch_namespaced_resource_quota("quota", self.namespace, quota)
        else:
            core.create_namespaced_resource_quota(self.namespace, quota)

        def counted() -> bool:
            found = core.read_namespaced_resource_quota("quota", self.namespace)
            return bool(found.status and found.status.hard == hard)

        wait_for("the quota", counted)

    def _get(self, path: str, selector: str) -> Json:
        text = self.api.call_api(
            *self.api.param_serialize(
                "GET",
                path,
                query_params=[("labelSelector", selector)],
                header_params={"Accept": "application/json"},
                auth_settings=["BearerToken"],
            )
        )
        answer: Json = json.loads(text.read())
        return answer

    @property
    def _custom(self) -> client.CustomObjectsApi:
        return client.CustomObjectsApi(self.api)


@dataclass(frozen=True)
class Job:
    """A PseudoRealJob, with its pods run by the test."""

    cluster: Cluster
    name: str

    @property
    def body(self) -> Json:
        found = self.cluster.find(self.name)
        assert found is not None, f"{self.name} is gone"
        return found

    @property
    def status(self) -> PseudoRealJobStatus:
        return PseudoRealJobStatus.model_validate(self.body.get("status", {}))

    def children(self, path: str) -> list[Json]:
        return self.cluster.list(path, f"{LABEL_JOB}={self.name}")

    def child_jobs(self) -> list[str]:
        """Return the bare names of the child Jobs."""
        return sorted(bare(job["metadata"]["name"]) for job in self.children("apis/batch/v1 jobs"))

    def events(self) -> list[Json]:
        uid = self.body["metadata"]["uid"]
        found = [e for e in self.cluster.list("api/v1 events") if e["involvedObject"].get("uid") == uid]
        return sorted(found, key=lambda event: event["eventTime"])

    def reasons(self) -> list[str]:
        return [event["reason"] for event in self.events()]

    def tells(self, *reasons: str) -> None:
        """Wait until the job's events have exactly these reasons. Events are posted after the status."""
        wait_for("the events", lambda: self.reasons() == list(reasons), self.reasons)

    def event(self, reason: str) -> Json:
        """Wait for the first event with this reason, and return it."""
        return wait_for(reason, lambda: next((e for e in self.events() if e["reason"] == reason), None), self.reasons)

    def condition(self, kind: str) -> Json:
        return next(c for c in self.body["status"]["conditions"] if c["type"] == kind)

    def wait(self, what: str, condition: Callable[[PseudoRealJobStatus], bool]) -> PseudoRealJobStatus:
        def reached() -> PseudoRealJobStatus | None:
            status = self.status
            return status if condition(status) else None

        return wait_for(what, reached, lambda: self.status)

    def suspend(self, value: bool) -> None:
        self.cluster.patch_job(self.name, {"spec": {"suspend": value}})

    def pods(self, child: str, count: int = 1) -> list[Json]:
        """Wait for all pods of a child Job, given by its bare name, and return them in rank order."""

        def found() -> list[Json] | None:
            pods = [
                pod for pod in self.children("api/v1 pods") if bare(pod["metadata"]["name"]).startswith(f"{child}-")
            ]
            alive = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
            return alive if len(alive) == count else None

        pods = wait_for(f"{count} pods of {child}", found, lambda: (self.status, self.child_jobs()))
        return sorted(pods, key=lambda pod: pod["metadata"]["name"])

    def run(self, child: str, count: int = 1) -> list[Json]:
        """Mark the pods of a child Job as running."""
        pods = self.pods(child, count)
        for pod in pods:
            self.start(pod)
        return pods

    def start(self, pod: Json) -> None:
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        self.cluster.patch_pod_status(pod["metadata"]["name"], status | _container({"running": {}}, ready=True))

    def bind(self, pod: Json, node: str) -> None:
        """Bind a pod to a node, as the scheduler does."""
        name, target = pod["metadata"]["name"], {"apiVersion": "v1", "kind": "Node", "name": node}
        body: Any = {"metadata": {"name": name}, "target": target}
        # The answer is not parsed: the Python client expects another kind than the API server sends.
        client.CoreV1Api(self.cluster.api).create_namespaced_pod_binding(
            name, self.cluster.namespace, body, _preload_content=False
        )

    def alive_pods(self) -> list[Json]:
        return [pod for pod in self.children("api/v1 pods") if pod["status"]["phase"] in ("Pending", "Running")]

    def keep_waiting(self, pod: Json, waiting: Json) -> None:
        """Report the trainer container of the pod as unable to start."""
        status = {"phase": "Pending"} | _container({"waiting": waiting})
        self.cluster.patch_pod_status(pod["metadata"]["name"], status)

    def end(
        self,
        pod: Json,
        outcome: Outcome = "Succeeded",
        exit_code: int | None = None,
        reason: str | None = None,
        **says: Any,
    ) -> None:
        """End a pod with a termination message; with `exit_code`, without one."""
        labels = pod["metadata"]["labels"]
        execution = int(labels["pseudoreal.dev/execution"])
        message = TerminationMessage(outcome=outcome, phase=labels[LABEL_PHASE], execution=execution, **says)
        code = EXIT_CODES[outcome].value if exit_code is None else exit_code
        self.end_with(pod, code, "" if exit_code is not None else message.to_json(), reason)

    def end_with(self, pod: Json, code: int, message: str, reason: str | None = None) -> None:
        """End a pod with the given text in its termination log."""
        ended = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        terminated = {"exitCode": code, "reason": reason or ("Completed" if code == 0 else "Error")}
        terminated |= {"message": message, "finishedAt": ended}
        phase = "Succeeded" if code == 0 else "Failed"
        status = {"phase": phase, "conditions": [{"type": "Ready", "status": "False"}]}
        self.cluster.patch_pod_status(pod["metadata"]["name"], status | _container({"terminated": terminated}))

    def complete(self, child: str, count: int = 1, **says: Any) -> None:
        """Run all pods of a child Job to success."""
        for pod in self.run(child, count):
            self.end(pod, **says)


RESULTS: dict[str, Json] = {
    "pseudo": {"step": 10, "tokens": 2560, "loss": 4.25, "start_validation_loss": 5.5, "validation_loss": 4.5},
    "delink": {"step": 10, "tokens": 2560, "loss": 4.25},
    "real": {"step": 20, "tokens": 5120, "loss": 3.25, "start_validation_loss": 4.5, "validation_loss": 3.5},
}
CHECKPOINTS = {"pseudo": "pseudo-10", "delink": "real-10", "real": "real-20"}


def complete_stage(job: Job, stage: str, execution: int = 1) -> None:
    """Complete a stage of `good_job` (tests.support.jobs): pseudo, delink or real."""
    child = {"pseudo": "pseudo", "delink": "real-delink", "real": "real"}[stage]
    job.complete(
        f"{job.name}-{child}-e{execution}",
        2 if stage == "real" else 1,
        checkpoint=CHECKPOINTS[stage],
        digest="0" * 64,
        **RESULTS[stage],
    )


def _container(state: Json, ready: bool = False) -> Json:
    status = {"name": CONTAINER, "image": "trainer", "imageID": "", "ready": ready, "restartCount": 0, "state": state}
    return {"containerStatuses": [status]}
