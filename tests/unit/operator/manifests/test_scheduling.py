"""Requests to queues and gang schedulers: labels, PodGroups, and pods that name their group."""

from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from pseudoreal_operator.manifests.objects import children
from pseudoreal_operator.observe.stages import Stage, StageKind

from tests.support.pod_groups import SPECS
from tests.unit.operator.manifests.support.rendered import DELINK, TRAIN, made, pod
from tests.unit.operator.support.world import SETTINGS, World, make_job

Json = dict[str, Any]

QUEUED = {"queue": "gpus"}
POLICIES = ["Native", "SchedulerPlugins", "Volcano"]


def kueue_labels(stage: Stage, **scheduling: Any) -> dict[str, str]:
    labels: dict[str, str] = made(stage, spec__scheduling=scheduling)["Job"]["metadata"]["labels"]
    return {name: value for name, value in labels.items() if name.startswith("kueue.x-k8s.io/")}


def is_suspended(stage: Stage, **scheduling: Any) -> bool:
    return bool(made(stage, spec__scheduling=scheduling)["Job"]["spec"].get("suspend"))


def test_only_queued_jobs_are_created_suspended() -> None:
    assert kueue_labels(TRAIN, **QUEUED) == {"kueue.x-k8s.io/queue-name": "gpus"}
    assert is_suspended(TRAIN, **QUEUED)
    assert kueue_labels(TRAIN) == {}
    assert "suspend" not in made()["Job"]["spec"], "who does not queue has nothing to do with it"


def test_delink_is_queued_only_on_request() -> None:
    assert (kueue_labels(DELINK, **QUEUED), is_suspended(DELINK, **QUEUED)) == ({}, False)
    asked = QUEUED | {"queueDelink": True, "workloadPriorityClassName": "urgent"}
    assert kueue_labels(DELINK, **asked) == kueue_labels(TRAIN, **asked)
    assert is_suspended(DELINK, **asked)


def test_queue_priority_is_not_the_priority_of_pods() -> None:
    scheduling = QUEUED | {"workloadPriorityClassName": "urgent", "priorityClassName": "batch"}
    assert kueue_labels(TRAIN, **scheduling)["kueue.x-k8s.io/priority-class"] == "urgent"
    assert pod(TRAIN, spec__scheduling=scheduling)["priorityClassName"] == "batch"


def group(stage: Stage = TRAIN, **scheduling: Any) -> Json | None:
    return made(stage, spec__scheduling=scheduling).get("PodGroup")


def template(**scheduling: Any) -> Json:
    found: Json = made(TRAIN, spec__scheduling=scheduling)["Job"]["spec"]["template"]
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_a_gang_has_all_pods_of_its_phase_and_follows_the_documented_schema(policy: str) -> None:
    found = group(gang={"policy": policy}, priorityClassName="batch")
    assert found
    schema = {"type": "object", "properties": SPECS[found["apiVersion"]], "additionalProperties": False}
    jsonschema.validate(found["spec"], schema)
    assert 2 in (
        found["spec"].get("minMember"),
        found["spec"].get("schedulingPolicy", {}).get("gang", {}).get("minCount"),
    )
    assert found["metadata"]["ownerReferences"][0]["kind"] == "PseudoRealJob"


def test_native_gang_follows_kubernetes_schemas() -> None:
    for manifest in made(TRAIN, spec__scheduling={"gang": {"policy": "Native"}, "priorityClassName": "batch"}).values():
        kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_pods_name_their_group() -> None:
    def name(policy: str) -> str:
        found = group(gang={"policy": policy})
        assert found
        return str(found["metadata"]["name"])

    native, plugins, volcano = (template(gang={"policy": policy}) for policy in POLICIES)
    assert native["spec"]["schedulingGroup"] == {"podGroupName": name("Native")}
    assert plugins["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == name("SchedulerPlugins")
    assert volcano["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == name("Volcano")
    assert [found["spec"].get("schedulerName") for found in (native, plugins, volcano)] == [None, None, "volcano"]
    mine = {"template": {"spec": {"schedulerName": "mine"}}}
    changes = {"spec__scheduling": {"gang": {"policy": "Volcano"}}, "spec__pod": mine}
    assert pod(TRAIN, **changes)["schedulerName"] == "mine", "a site may call its scheduler as it likes"


def test_pod_group_is_created_before_its_job_and_only_on_request() -> None:
    job = make_job(spec__scheduling={"gang": {"policy": "Volcano"}})
    kinds = [child["kind"] for child in children(job, TRAIN, World(job).status, SETTINGS)]
    assert kinds[-2:] == ["PodGroup", "Job"]
    assert group() is None
    assert group(gang={"policy": "None"}) is None
    assert group(DELINK, gang={"policy": "Volcano"}) is None, "it is one pod"


def test_pod_group_is_the_same_for_all_executions_of_a_phase() -> None:
    def name(stage: Stage = TRAIN, execution: int = 3, seconds: int | None = 60) -> str:
        gang = {"policy": "SchedulerPlugins"} | ({"timeoutSeconds": seconds} if seconds else {})
        found = made(stage, execution, spec__scheduling={"gang": gang})["PodGroup"]
        assert found["spec"].get("scheduleTimeoutSeconds") == seconds
        return str(found["metadata"]["name"])

    assert name() == name(execution=4)
    others = {name(), name(seconds=61), name(seconds=None), name(Stage(0, "pseudo", StageKind.TRAIN))}
    assert len(others) == 4
    assert all(len(other) <= 63 for other in others)
