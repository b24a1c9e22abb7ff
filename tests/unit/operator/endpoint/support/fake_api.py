"""A fake API server that knows some tokens and some pods."""

from dataclasses import dataclass, field
from typing import Any

from pseudoreal_api.wire.reports import REPORT_AUDIENCE
from pseudoreal_operator.cluster.api import Api

Json = dict[str, Any]


def review_of(
    pod: str = "j-pseudo-e1-0", uid: str = "pod-uid", namespace: str = "default", audience: str = REPORT_AUDIENCE
) -> Json:
    """Return the status of a TokenReview, as the API server answers for a token that is bound to a pod."""
    return {
        "authenticated": True,
        "audiences": [audience],
        "user": {
            "username": f"system:serviceaccount:{namespace}:default",
            "extra": {
                "authentication.kubernetes.io/pod-name": [pod],
                "authentication.kubernetes.io/pod-uid": [uid],
            },
        },
    }


def pod_body(
    name: str = "j-pseudo-e1-0", uid: str = "pod-uid", namespace: str = "default", index: int = 0, **labels: str
) -> Json:
    marks = {"job-name": "j", "job-uid": "job-uid", "phase": "pseudo", "execution": "1", "stage": "train"}
    return {
        "metadata": {
            "name": name,
            "uid": uid,
            "namespace": namespace,
            "labels": {f"pseudoreal.dev/{key}": value for key, value in (marks | labels).items()},
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        }
    }


@dataclass
class FakeApi(Api):
    """A fake API server. `tokens` maps tokens to statuses of reviews, `pods` names to bodies. `failure` is raised
    instead of an answer."""

    tokens: dict[str, Json] = field(default_factory=dict)
    pods: dict[str, Json] = field(default_factory=dict)
    failure: Exception | None = None
    reviews: int = 0

    async def create_review(self, review: Json) -> Json:
        self.reviews += 1
        if self.failure:
            raise self.failure
        assert review["spec"]["audiences"] == [REPORT_AUDIENCE]
        return {"status": self.tokens.get(review["spec"]["token"], {"authenticated": False, "user": {}})}

    async def find(self, kind: str, namespace: str, name: str) -> Json | None:
        assert kind == "Pod"
        body = self.pods.get(name)
        return body if body and body["metadata"]["namespace"] == namespace else None

    def add(self, token: str, **differs: Any) -> None:
        """Add a pod of a training job, and its token."""
        body = pod_body(**differs)
        self.pods[body["metadata"]["name"]] = body
        self.tokens[token] = review_of(*(body["metadata"][key] for key in ("name", "uid", "namespace")))
