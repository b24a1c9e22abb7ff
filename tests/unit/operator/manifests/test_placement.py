"""Nodes to be avoided, and what training pods report to."""

from typing import Any

from pseudoreal_operator.manifests.objects import claim

from tests.unit.operator.manifests.rendered import (
    DELINK,
    SITE,
    TRAIN,
    container_of,
    environment_of,
    files_of,
    made,
    pod_of,
    rendered,
)
from tests.unit.operator.world import UID, make_job

Json = dict[str, Any]

PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
AVOID = {
    "weight": 100,
    "preference": {
        "matchFields": [
            {"key": "metadata.name", "operator": "NotIn", "values": ["node-2"]},
            {"key": "metadata.name", "operator": "NotIn", "values": ["node-7"]},
        ]
    },
}


def affinity(affinity: Json | None = None, **network: Any) -> Json:
    changes: Json = {"spec__pod": {"template": {"spec": {"affinity": affinity}}}} if affinity is not None else {}
    found = rendered(TRAIN, 3, {"avoid": ("node-7", "node-2")}, spec__network=network, **changes)
    made: Json = pod_of(found)["affinity"]
    return made


def test_nodes_to_avoid_come_last() -> None:
    assert affinity() == {"nodeAffinity": {PREFERRED: [AVOID]}}
    assert pod_of(rendered(DELINK, 3, {"avoid": ("node-2", "node-7")}))["affinity"] == affinity()
    assert "affinity" not in pod_of(made())


def test_the_user_s_own_terms_stay() -> None:
    mine = {"weight": 1, "preference": {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}}
    zone = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}
    apart = {"labelSelector": {"matchLabels": {"noisy": "true"}}, "topologyKey": "rack"}
    given = {"nodeAffinity": {PREFERRED: [mine], REQUIRED: zone}, "podAntiAffinity": {REQUIRED: [apart]}}
    found = affinity(given, hostNetwork=True)
    assert found["nodeAffinity"] == {PREFERRED: [mine, AVOID], REQUIRED: zone}
    assert found["podAntiAffinity"][REQUIRED][0] == apart
    assert found["podAntiAffinity"][REQUIRED][1]["topologyKey"] == "kubernetes.io/hostname"


def test_a_training_pod_may_report_and_nothing_else() -> None:
    found = rendered(TRAIN, 3, {"settings": SITE})
    assert pod_of(found)["automountServiceAccountToken"] is False
    assert environment_of(found)["PSEUDOREAL_REPORT_URL"] == SITE.report_url
    token = {"audience": "operator.pseudoreal.dev", "expirationSeconds": 3600, "path": "token"}
    volume = {"name": "report-token", "projected": {"sources": [{"serviceAccountToken": token}]}}
    assert volume in pod_of(found)["volumes"]
    mount = {"name": "report-token", "mountPath": "/var/run/secrets/pseudoreal.dev", "readOnly": True}
    assert mount in container_of(found)["volumeMounts"]
    assert files_of(found["Job"])["operator-ca.crt"] == SITE.report_ca


def test_without_an_address_there_is_nothing_to_report_with() -> None:
    for found in (made(), rendered(DELINK, 3, {"settings": SITE})):
        assert "PSEUDOREAL_REPORT_URL" not in environment_of(found)
        assert "report-token" not in {volume["name"] for volume in pod_of(found)["volumes"]}
        assert "operator-ca.crt" not in files_of(found["Job"])


def test_a_training_pod_knows_its_node() -> None:
    name = {"name": "PSEUDOREAL_NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    assert name in container_of(made())["env"]
    assert name not in container_of(made(DELINK))["env"]


def _claim(spec: Json | None = None, **changes: Any) -> Json | None:
    volume = {"claimTemplate": {"spec": spec or {}}} | changes
    return claim(make_job(spec__checkpoint={"storage": {"volume": volume}}))


def test_a_claim_that_stays_belongs_to_nobody() -> None:
    found = _claim({"resources": {"requests": {"storage": "1Ti"}}})
    assert found is not None
    assert (found["apiVersion"], found["kind"]) == ("v1", "PersistentVolumeClaim")
    assert (found["metadata"]["name"], found["metadata"]["namespace"]) == ("sim-checkpoints", "default")
    assert found["metadata"]["labels"]["pseudoreal.dev/job-name"] == "sim"
    assert "pseudoreal.dev/job-uid" not in found["metadata"]["labels"]
    assert "ownerReferences" not in found["metadata"]
    assert found["spec"] == {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Ti"}}}


def test_a_claim_that_goes_with_the_job() -> None:
    found = _claim({"storageClassName": "fast", "accessModes": ["ReadWriteOnce"]}, retentionPolicy="Delete")
    assert found is not None
    (owner,) = found["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("PseudoRealJob", UID)
    assert found["metadata"]["labels"]["pseudoreal.dev/job-uid"] == UID
    assert (found["spec"]["storageClassName"], found["spec"]["accessModes"]) == ("fast", ["ReadWriteOnce"])


def test_a_job_that_says_nothing_of_storage_has_a_claim() -> None:
    found = claim(make_job(spec__checkpoint={}))
    assert found is not None
    # Twice the six checkpoints of two phases of a small model, and room for what a disk itself needs.
    assert found["spec"] == {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1061Mi"}}}
    alone = claim(make_job(spec__checkpoint={}, spec__phases__1__workers=1))
    assert alone is not None
    assert alone["spec"]["accessModes"] == ["ReadWriteOnce"], "its volume follows the one pod"


def test_no_claim_is_made_where_none_is_asked_for() -> None:
    objects = {"type": "ObjectStorage", "objectStorage": {"url": "s3://bucket/prefix"}}
    assert claim(make_job()) is None
    assert claim(make_job(spec__checkpoint={"storage": objects})) is None


def test_pods_mount_the_claim_that_is_made() -> None:
    changes: dict[str, Any] = {"spec__checkpoint": {"storage": {"volume": {}}}}
    for stage in (TRAIN, DELINK):
        volume = next(v for v in pod_of(made(stage, **changes))["volumes"] if v["name"] == "checkpoints")
        assert volume["persistentVolumeClaim"] == {"claimName": "sim-checkpoints"}
