"""Changes of children that need a pass, and how long the pass waits for more of them."""

from copy import deepcopy
from typing import Any

import pytest
from pseudoreal_operator.loop.event_router import ROUTINE_SECONDS, STARTING_SECONDS, URGENT_SECONDS, delay_of
from pseudoreal_operator.observe.memory import Memory

Json = dict[str, Any]

LABELS = {"job-name": "llm", "job-uid": "one", "phase": "real", "stage": "train", "execution": "1"}
BODY: Json = {
    "metadata": {
        "name": "llm-real-e1-0",
        "namespace": "default",
        "uid": "child",
        "labels": {f"pseudoreal.dev/{key}": value for key, value in LABELS.items()},
        "ownerReferences": [{"kind": "Job", "uid": "job", "controller": True}],
        "resourceVersion": "1",
    },
    "spec": {},
    "status": {},
}
ENDED = {"terminated": {"exitCode": 1, "reason": "Error", "message": "", "finishedAt": "2026-01-01T00:00:00Z"}}


def make_body(metadata: Json | None = None, **status: Any) -> Json:
    found = deepcopy(BODY)
    found["metadata"] |= metadata or {}
    found["status"] = status
    return found


class ChangeFilter:
    """The memory, and the delay of the pass after each change of a child."""

    def __init__(self) -> None:
        self.memory = Memory()

    def delay(self, kind: str, change: str, body: Json) -> float | None:
        return delay_of(self.memory.child_changed(kind, change, body))


def make_conditions(kind: str) -> list[Json]:
    return [{"type": kind, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]


@pytest.mark.parametrize(
    ("kind", "status", "after"),
    [
        ("Pod", {"phase": "Pending"}, ROUTINE_SECONDS),
        ("Pod", {"phase": "Running"}, STARTING_SECONDS),
        ("Pod", {"phase": "Succeeded"}, ROUTINE_SECONDS),
        ("Pod", {"phase": "Failed"}, URGENT_SECONDS),
        ("Pod", {"phase": "Running", "conditions": make_conditions("DisruptionTarget")}, URGENT_SECONDS),
        ("Job", {"active": 2}, ROUTINE_SECONDS),
        ("Job", {"conditions": make_conditions("Complete")}, URGENT_SECONDS),
        ("Job", {"conditions": make_conditions("Failed")}, URGENT_SECONDS),
        ("Job", {"conditions": make_conditions("FailureTarget")}, URGENT_SECONDS),
        ("Job", {"conditions": make_conditions("Suspended")}, ROUTINE_SECONDS),
    ],
)
def test_change_filter_delays_by_the_urgency_of_the_event(kind: str, status: Json, after: float) -> None:
    assert ChangeFilter().delay(kind, "MODIFIED", make_body(**status)) == after


@pytest.mark.parametrize(
    ("kind", "before", "later"),
    [
        (
            "Job",
            make_body(active=2),
            make_body({"resourceVersion": "2"}, active=1, ready=1, uncountedTerminatedPods={}),
        ),
        (
            "Pod",
            make_body(phase="Running"),
            make_body({"finalizers": [], "annotations": {"seen": "yes"}}, phase="Running"),
        ),
    ],
)
def test_change_of_fields_that_no_pass_reads_is_dropped(kind: str, before: Json, later: Json) -> None:
    changes = ChangeFilter()
    assert changes.delay(kind, "ADDED", before) is not None
    assert changes.delay(kind, "MODIFIED", later) is None


@pytest.mark.parametrize(
    "change",
    [
        make_body({"labels": BODY["metadata"]["labels"] | {"pseudoreal.dev/execution": "2"}}, phase="Running"),
        make_body({"labels": BODY["metadata"]["labels"] | {"pseudoreal.dev/job-uid": "two"}}, phase="Running"),
        make_body({"ownerReferences": []}, phase="Running"),
        make_body({"deletionTimestamp": "2026-01-01T00:00:00Z"}, phase="Running"),
        make_body(phase="Running", conditions=make_conditions("Ready")),
        make_body(phase="Running", containerStatuses=[{"name": "trainer", "state": ENDED}]),
        make_body(phase="Failed"),
    ],
)
def test_change_of_fields_that_a_pass_reads_passes_the_filter_each_time(change: Json) -> None:
    changes, first = ChangeFilter(), make_body(phase="Running")
    assert [changes.delay("Pod", "MODIFIED", one) is not None for one in (first, change, change, first)] == [
        *(True, True, False, True)
    ]


def test_deleted_or_unreadable_child_always_passes_the_filter() -> None:
    changes, wrong = ChangeFilter(), make_body({"labels": {}}, phase="Running")
    assert [changes.delay("Pod", "MODIFIED", wrong) for _ in range(2)] == [URGENT_SECONDS] * 2
    assert changes.delay("Pod", "ADDED", make_body(phase="Pending")) is not None
    assert changes.delay("Pod", "DELETED", make_body(phase="Pending")) == URGENT_SECONDS
    assert (changes.memory._names, changes.memory._families) == ({}, {}), "nothing is kept of what is gone"
