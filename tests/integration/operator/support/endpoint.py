"""The report endpoint as a training pod uses it."""

import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from typing import Any

from pseudoreal_api.names import REPORT_CA_FILE, file_annotation
from pseudoreal_api.wire.messages import ProgressReport
from pseudoreal_api.wire.reports import REPORT_URL, Activity, PodReport, RankReport, ReportAnswer, SavedCheckpoint

from tests.support.cluster import Cluster
from tests.support.patience import wait_for

Json = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    status: int
    text: str

    @property
    def finish_phase(self) -> bool:
        return ReportAnswer.model_validate_json(self.text).finish_phase


@dataclass(frozen=True)
class Reporter:
    url: str
    authority: str
    token: str

    @classmethod
    def of(cls, cluster: Cluster, pod: Json) -> "Reporter":
        """Return a reporter according to the pod's spec, with a token like the kubelet's projection into the pod."""
        (container,) = pod["spec"]["containers"]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        (source,) = volumes["report-token"]["projected"]["sources"]
        token = cluster.token(pod, source["serviceAccountToken"]["audience"])
        url = next(entry["value"] for entry in container["env"] if entry["name"] == REPORT_URL)
        return cls(url, pod["metadata"]["annotations"][file_annotation(REPORT_CA_FILE)], token)

    def with_token(self, token: str) -> "Reporter":
        return replace(self, token=token)

    def send(self, report: PodReport) -> Answer:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url, data=report.to_json().encode(), headers=headers)
        trusted = ssl.create_default_context(cadata=self.authority)
        try:
            with urllib.request.urlopen(request, timeout=10, context=trusted) as answer:
                return Answer(answer.status, answer.read().decode())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read().decode())

    def tell(self, report: PodReport) -> Answer:
        """Send a report until the operator accepts it. The operator may not follow the job yet."""

        def told() -> Answer | None:
            answer = self.send(report)
            return answer if answer.status == 200 else None

        return wait_for("a report that is taken", told, lambda: self.send(report))


def sign(rank: int, step: int, activity: Activity = "computing") -> RankReport:
    return RankReport(rank=rank, activity=activity, seconds=1, step=step)


def progress(step: int, **changes: Any) -> ProgressReport:
    values: dict[str, Any] = {
        "phase": "pseudo",
        "step": step,
        "total_steps": 20,
        "tokens": step * 256,
        "loss": 5.0 - step / 10,
        "validation_loss": 4.75,
        "learning_rate": 1e-3,
        "tokens_per_second": 128.0,
        "seconds": step * 2.0,
        "remaining_seconds": 30.0,
        "global_cursor": step * 8,
    }
    return ProgressReport.model_validate(values | changes)


def at(step: int, checkpoint: SavedCheckpoint | None = None) -> PodReport:
    """Return a report of the pod of rank 0, for a job of one rank."""
    return PodReport(ranks=[sign(0, step)], progress=progress(step), checkpoint=checkpoint)
