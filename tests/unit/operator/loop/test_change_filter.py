"""Changes of children that need a pass, and how long the pass waits for more of them."""

from copy import deepcopy
from typing import Any

import pytest
from pseudoreal_operator.loop.event_router import ROUTINE_SECONDS, STARTING_SECONDS, URGENT_SECONDS, ChangeFilter

Json = dict[str, Any]

LABELS = {"job-name": "llm", "job-uid": "one", "phase": "real", "stage": "train", "execution": "1"}
BODY: Json = {
    "metadata": {
        "name": "llm-real-e1-0",
        "uid": "child",
        "labels": {f"pseudoreal.dev/{key}": value for key, value in LABELS.items()},
        "ownerReferences": [{"kind": "Job", "uid": "job", "controller": True}],
        "resourceVersion": "1",
    },
    "spec": {},
    "status": {},
}
ENDED = {"terminated": {"exitCode": 1, "reason": "Error", "message": "", "finishedAt": "2026-01-01T00:00:00Z"}}


def body(metadata: Json | None = None, **status: Any) -> Json:
    found = deepcopy(BODY)
    found["metadata"] |= metadata or {}
    found["status"] = status
    return found


def condition(kind: str) -> list[Json]:
    return [{"type": kind, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]


@pytest.mark.parametrize(
    ("kind", "status", "after"),
    [
        ("Pod", {"phase": "Pending"}, ROUTINE_SECONDS),
        ("Pod", {"phase": "Running"}, STARTING_SECONDS),
        ("Pod", {"phase": "Succeeded"}, ROUTINE_SECONDS),
        ("Pod", {"phase": "Failed"}, URGENT_SECONDS),
        ("Pod", {"phase": "Running", "conditions": condition("DisruptionTarget")}, URGENT_SECONDS),
        ("Job", {"active": 2}, ROUTINE_SECONDS),
        ("Job", {"conditions": condition("Complete")}, URGENT_SECONDS),
        ("Job", {"conditions": condition("Failed")}, URGENT_SECONDS),
        ("Job", {"conditions": condition("FailureTarget")}, URGENT_SECONDS),
        ("Job", {"conditions": condition("Suspended")}, ROUTINE_SECONDS),
    ],
)
def test_what_ends_something_is_looked_at_soon(kind: str, status: Json, after: float) -> None:
    assert ChangeFilter().delay(kind, "MODIFIED", body(**status)) == after


@pytest.mark.parametrize(
    ("kind", "before", "later"),
    [
        ("Job", body(active=2), body({"resourceVersion": "2"}, active=1, ready=1, uncountedTerminatedPods={})),
        ("Pod", body(phase="Running"), body({"finalizers": [], "annotations": {"seen": "yes"}}, phase="Running")),
    ],
)
def test_what_no_pass_reads_is_no_news(kind: str, before: Json, later: Json) -> None:
    changes = ChangeFilter()
    assert changes.delay(kind, "ADDED", before) is not None
    assert changes.delay(kind, "MODIFIED", later) is None


@pytest.mark.parametrize(
    "change",
    [
        body({"labels": BODY["metadata"]["labels"] | {"pseudoreal.dev/execution": "2"}}, phase="Running"),
        body({"labels": BODY["metadata"]["labels"] | {"pseudoreal.dev/job-uid": "two"}}, phase="Running"),
        body({"ownerReferences": []}, phase="Running"),
        body({"deletionTimestamp": "2026-01-01T00:00:00Z"}, phase="Running"),
        body(phase="Running", conditions=condition("Ready")),
        body(phase="Running", containerStatuses=[{"name": "trainer", "state": ENDED}]),
        body(phase="Failed"),
    ],
)
def test_what_a_pass_reads_is_news_each_time_it_changes(change: Json) -> None:
    changes, first = ChangeFilter(), body(phase="Running")
    assert [changes.delay("Pod", "MODIFIED", one) is not None for one in (first, change, change, first)] == [
        *(True, True, False, True)
    ]


def test_a_child_that_goes_or_that_cannot_be_read_is_always_news() -> None:
    changes, wrong = ChangeFilter(), body({"labels": {}}, phase="Running")
    assert [changes.delay("Pod", "MODIFIED", wrong) for _ in range(2)] == [URGENT_SECONDS] * 2
    assert changes.delay("Pod", "ADDED", body(phase="Pending")) is not None
    assert changes.delay("Pod", "DELETED", body(phase="Pending")) == URGENT_SECONDS
    assert changes._hashes == {}, "nothing is kept of what is gone"


def test_all_is_news_again_when_changes_were_missed() -> None:
    changes = ChangeFilter()
    changes.delay("Pod", "ADDED", body(phase="Running"))
    changes.clear()
    assert changes.delay("Pod", "MODIFIED", body(phase="Running")) == STARTING_SECONDS
