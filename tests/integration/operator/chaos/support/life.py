"""The whole life of one job: the test acts as the kubelet, and keeps the results for comparison."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError

from kubernetes import client
from pseudoreal_api.names import LABEL_PHASE, LABEL_STAGE

from tests.integration.operator.chaos.support.proxy import Proxy
from tests.support.cluster import CHECKPOINTS, RESULTS, Cluster, Job
from tests.support.names import bare_child
from tests.support.operator_process import Operator
from tests.support.patience import PATIENCE_SECONDS, wait_for

Json = dict[str, Any]

JOB = "life"
LIFE_SECONDS = 3 * PATIENCE_SECONDS
ILL_SECONDS = 45.0
"""Seconds for three failures of the liveness probe, 15 s apart, as in the chart."""
_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")


@dataclass(frozen=True)
class Story:
    """Results equal in every life. `created` counts the operator's created objects by kind and name or reason."""

    end: Json
    created: Counter[tuple[str, str]]


@dataclass
class Life:
    """One job in its own namespace, with its own operator, which reaches the API server through its own proxy."""

    cluster: Cluster
    proxy: Proxy
    operator: Operator
    starts: int = 0
    ill_since: float | None = None
    job: Job = field(init=False)

    def live(self) -> Story:
        self.create()
        return self.live_on()

    def live_on(self) -> Story:
        self.run_to_the_end()
        self.until("the last event", lambda: self.starts > 1 or ("Event", "Completed") in self._created())
        end = _essence(self.job.body)
        self.delete()
        return Story(end, Counter(self._created()))

    def create(self) -> None:
        self.job = self.cluster.create(JOB)

    def run_to_the_end(self) -> None:
        self.until("the end of the job", lambda: "completionTime" in self.job.body.get("status", {}))

    def delete(self) -> None:
        self.cluster.delete_job(JOB)
        self.until("the deletion of the job", lambda: self.cluster.find(JOB) is None)

    def until(self, what: str, condition: Callable[[], object]) -> None:
        def probe() -> bool:
            self._keep_operator()
            self._run_pods()
            return bool(condition())

        wait_for(what, probe, self.explain, LIFE_SECONDS)

    def explain(self) -> str:
        requests = [f"{exchange.status} {exchange}" for exchange in self.proxy.exchanges[-20:]]
        log = self.operator.log.read_text().splitlines()[-20:]
        return "\n".join([str(self.cluster.find(JOB)), *requests, *log])

    def health(self) -> int:
        """Return the status code of the liveness probe; 0 without an answer."""
        try:
            self.operator.health()
        except HTTPError as error:
            return error.code
        except (URLError, OSError, HTTPException):
            return 0
        return 200

    def _keep_operator(self) -> None:
        if self.operator.is_running and not self._is_given_up():
            return
        if self.operator.is_running:
            self.operator.kill()
        self.operator.start()
        self.starts += 1
        self.ill_since = None

    def _is_given_up(self) -> bool:
        if self.health() != 500:
            self.ill_since = None
            return False
        self.ill_since = self.ill_since or time.monotonic()
        return time.monotonic() - self.ill_since > ILL_SECONDS

    def _run_pods(self) -> None:
        """Advance every pod by one step."""
        for pod in self.job.children("api/v1 pods"):
            # The garbage collector may have deleted the pod meanwhile.
            with suppress(client.exceptions.NotFoundException):
                self._run_pod(pod)

    def _run_pod(self, pod: Json) -> None:
        phase = pod["status"]["phase"]
        if "deletionTimestamp" in pod["metadata"]:
            return
        if phase == "Pending":
            self.job.start(pod)
        elif phase == "Running":
            stage = _stage(pod)
            self.job.end(pod, checkpoint=CHECKPOINTS[stage], digest="0" * 64, **RESULTS[stage])

    def _created(self) -> Iterator[tuple[str, str]]:
        for exchange in self.proxy.exchanges:
            if body := exchange.created:
                kind, name = body["kind"], body["metadata"]["name"]
                yield kind, body["reason"] if kind == "Event" else bare_child(kind, name)


def _stage(pod: Json) -> str:
    labels = pod["metadata"]["labels"]
    return "delink" if labels[LABEL_STAGE] == "delink" else labels[LABEL_PHASE]


def _essence(body: Json) -> Json:
    """Return the status without times, and the annotations, where kopf could have left some."""
    status = body["status"]
    kept = {key: status.get(key) for key in ("state", "execution", "restarts", "checkpoint", "phases")}
    kept["conditions"] = sorted([c["type"], c["status"], c["reason"]] for c in status["conditions"])
    kept["annotations"] = body["metadata"].get("annotations")
    timeless: Json = json.loads(_TIME.sub("some time", json.dumps(kept)))
    return timeless
