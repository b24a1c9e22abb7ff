"""Changes of children that need a pass, and how long the pass waits for more of them."""

from copy import deepcopy
from typing import Any

import pytest
from pseudoreal_operator.observe.change_filter import ROUTINE_SECONDS, RUNS_SECONDS, SOON_SECONDS, ChangeFilter

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
        ("Pod", {"phase": "Running"}, RUNS_SECONDS),
        ("Pod", {"phase": "Succeeded"}, ROUTINE_SECONDS),
        ("Pod", {"phase": "Failed"}, SOON_SECONDS),
        ("Pod", {"phase": "Running", "conditions": condition("DisruptionTarget")}, SOON_SECONDS),
        ("Job", {"active": 2}, ROUTINE_SECONDS),
        ("Job", {"conditions": condition("Complete")}, SOON_SECONDS),
        ("Job", {"conditions": condition("Failed")}, SOON_SECONDS),
        ("Job", {"conditions": condition("FailureTarget")}, SOON_SECONDS),
        ("Job", {"conditions": condition("Suspended")}, ROUTINE_SECONDS),
    ],
)
def test_ends_of_children_get_a_short_delay(kind: str, status: Json, after: float) -> None:
    assert ChangeFilter().delay(kind, "MODIFIED", body(**status)) == after


@pytest.mark.parametrize(
    ("kind", "before", "later"),
    [
        ("Job", body(active=2), body({"resourceVersion": "2"}, active=1, ready=1, uncountedTerminatedPods={})),
        ("Pod", body(phase="Running"), body({"finalizers": [], "annotations": {"seen": "yes"}}, phase="Running")),
    ],
)
def test_changes_that_no_pass_reads_are_filtered(kind: str, before: Json, later: Json) -> None:
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
def test_each_change_that_a_pass_reads_needs_a_pass(change: Json) -> None:
    changes, first = ChangeFilter(), body(phase="Running")
    assert [changes.delay("Pod", "MODIFIED", one) is not None for one in (first, change, change, first)] == [
        *(True, True, False, True)
    ]


def test_deleted_or_unreadable_child_always_needs_a_pass() -> None:
    changes, wrong = ChangeFilter(), body({"labels": {}}, phase="Running")
    assert [changes.delay("Pod", "MODIFIED", wrong) for _ in range(2)] == [SOON_SECONDS] * 2
    assert changes.delay("Pod", "ADDED", body(phase="Pending")) is not None
    assert changes.delay("Pod", "DELETED", body(phase="Pending")) == SOON_SECONDS
    assert changes._hashes == {}, "nothing is kept of what is gone"


def test_forget_all_lets_every_event_through() -> None:
    changes = ChangeFilter()
    changes.delay("Pod", "ADDED", body(phase="Running"))
    changes.forget_all()
    assert changes.delay("Pod", "MODIFIED", body(phase="Running")) == RUNS_SECONDS
