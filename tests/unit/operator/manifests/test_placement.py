"""Avoided nodes, topology, claims for one node, and the fields by which training pods report."""

from dataclasses import replace
from typing import Any

import pytest
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_operator.manifests.objects import children, claim_manifest
from pseudoreal_operator.observe.claims import Claim, ClaimPhase
from pseudoreal_operator.observe.stages import Stage

from tests.unit.operator.manifests.support.rendered import (
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
from tests.unit.operator.support.world import SETTINGS, UID, make_job

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


def test_avoided_nodes_are_a_preference() -> None:
    assert affinity() == {"nodeAffinity": {PREFERRED: [AVOID]}}
    assert pod_of(rendered(DELINK, 3, {"avoid": ("node-2", "node-7")}))["affinity"] == affinity()
    assert "affinity" not in pod_of(made())


def test_users_affinity_terms_stay() -> None:
    mine = {"weight": 1, "preference": {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}}
    zone = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}
    apart = {"labelSelector": {"matchLabels": {"noisy": "true"}}, "topologyKey": "rack"}
    given = {"nodeAffinity": {PREFERRED: [mine], REQUIRED: zone}, "podAntiAffinity": {REQUIRED: [apart]}}
    found = affinity(given, hostNetwork=True)
    assert found["nodeAffinity"] == {PREFERRED: [mine, AVOID], REQUIRED: zone}
    assert found["podAntiAffinity"][REQUIRED][0] == apart
    assert found["podAntiAffinity"][REQUIRED][1]["topologyKey"] == "kubernetes.io/hostname"


RACK = "topology.example/rack"
PEERS = {
    "labelSelector": {
        "matchLabels": {
            "pseudoreal.dev/job-uid": UID,
            "pseudoreal.dev/phase": "real",
            "pseudoreal.dev/execution": "3",
            "pseudoreal.dev/stage": "train",
        }
    },
    "topologyKey": RACK,
}
WEIGHED = {"weight": 100, "podAffinityTerm": PEERS}


def near(topology: Json, **scheduling: Any) -> tuple[Json, dict[str, str], Json]:
    """Return what the pods, Kueue and Volcano are asked for: affinity, annotations, and the spec of the PodGroup."""
    found = made(spec__scheduling={"topology": topology} | scheduling)
    template = found["Job"]["spec"]["template"]
    marks = {key: value for key, value in template["metadata"]["annotations"].items() if key.startswith("kueue")}
    return template["spec"].get("affinity", {}), marks, found.get("PodGroup", {}).get("spec", {})


def test_topology_becomes_pod_affinity_without_kueue_and_volcano() -> None:
    for gang in ("None", "SchedulerPlugins", "Native"):
        asked, marks, _ = near({"required": RACK}, gang={"policy": gang})
        assert (asked, marks) == ({"podAffinity": {REQUIRED: [PEERS]}}, {})
    assert near({"preferred": RACK})[0] == {"podAffinity": {PREFERRED: [WEIGHED]}}


def test_pods_match_their_own_affinity_term() -> None:
    """Only for this reason does Kubernetes let the first pod go anywhere."""
    found = made(spec__scheduling={"topology": {"required": RACK}})["Job"]["spec"]["template"]
    (term,) = found["spec"]["affinity"]["podAffinity"][REQUIRED]
    assert term["labelSelector"]["matchLabels"].items() <= found["metadata"]["labels"].items()


def test_topology_becomes_kueue_annotations() -> None:
    asked = {"required": RACK}, {"queue": "gpus"}
    assert near(asked[0], **asked[1])[:2] == ({}, {"kueue.x-k8s.io/podset-required-topology": RACK})
    assert near({"preferred": RACK}, queue="gpus")[:2] == ({}, {"kueue.x-k8s.io/podset-preferred-topology": RACK})


def test_topology_becomes_volcano_network_topology() -> None:
    def group(**scheduling: Any) -> tuple[Json | None, str]:
        found = made(spec__scheduling={"gang": {"policy": "Volcano"}} | scheduling)
        assert "affinity" not in pod_of(found)
        return found["PodGroup"]["spec"].get("networkTopology"), found["PodGroup"]["metadata"]["name"]

    hard, soft, none = group(topology={"required": RACK}), group(topology={"preferred": RACK}), group()
    assert hard[0] == {"mode": "hard", "highestTierName": RACK}
    assert soft[0] == {"mode": "soft"}
    assert none[0] is None
    assert len({name for _, name in (hard, soft, none)}) == 3
    _, marks, volcano = near({"required": RACK}, queue="gpus", gang={"policy": "Volcano"})
    assert marks
    assert volcano["networkTopology"] == hard[0]


def test_delink_has_no_affinity() -> None:
    found = made(DELINK, spec__scheduling={"topology": {"required": RACK}, "queue": "gpus", "queueDelink": True})
    assert "affinity" not in pod_of(found)
    assert not any(key.startswith("kueue") for key in found["Job"]["spec"]["template"]["metadata"]["annotations"])


def test_training_pod_knows_its_topology_domain() -> None:
    path = {"fieldRef": {"fieldPath": f"metadata.labels['{RACK}']"}}
    label = {"name": "PSEUDOREAL_TOPOLOGY_DOMAIN", "valueFrom": path}
    assert label in container_of(made(spec__scheduling={"topology": {"preferred": RACK}}))["env"]
    assert label["name"] not in {variable["name"] for variable in container_of(made())["env"]}


def test_token_of_a_training_pod_is_only_for_reports() -> None:
    found = rendered(TRAIN, 3, {"settings": SITE})
    assert pod_of(found)["automountServiceAccountToken"] is False
    assert environment_of(found)["PSEUDOREAL_REPORT_URL"] == SITE.report_url
    token = {"audience": "operator.pseudoreal.dev", "expirationSeconds": 3600, "path": "token"}
    volume = {"name": "report-token", "projected": {"sources": [{"serviceAccountToken": token}]}}
    assert volume in pod_of(found)["volumes"]
    mount = {"name": "report-token", "mountPath": "/var/run/secrets/pseudoreal.dev", "readOnly": True}
    assert mount in container_of(found)["volumeMounts"]
    assert files_of(found["Job"])["operator-ca.crt"] == SITE.report_ca


def test_pods_have_no_token_without_a_report_url() -> None:
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
    return claim_manifest(make_job(spec__checkpoint={"storage": {"volume": volume}}))


def test_retained_claim_has_no_owner() -> None:
    found = _claim({"resources": {"requests": {"storage": "1Ti"}}})
    assert found is not None
    assert (found["apiVersion"], found["kind"]) == ("v1", "PersistentVolumeClaim")
    assert (found["metadata"]["name"], found["metadata"]["namespace"]) == ("sim-checkpoints", "default")
    assert found["metadata"]["labels"]["pseudoreal.dev/job-name"] == "sim"
    assert "pseudoreal.dev/job-uid" not in found["metadata"]["labels"]
    assert "ownerReferences" not in found["metadata"]
    assert found["spec"] == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Ti"}}}


def test_deleted_claim_is_owned_by_the_job() -> None:
    found = _claim({"storageClassName": "fast", "accessModes": ["ReadWriteOnce"]}, retentionPolicy="Delete")
    assert found is not None
    (owner,) = found["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("PseudoRealJob", UID)
    assert found["metadata"]["labels"]["pseudoreal.dev/job-uid"] == UID
    assert (found["spec"]["storageClassName"], found["spec"]["accessModes"]) == ("fast", ["ReadWriteOnce"])


def test_default_storage_is_a_claim() -> None:
    found = claim_manifest(make_job(spec__checkpoint={}))
    assert found is not None
    # Twice the six checkpoints of two phases of a small model, and room for what a disk itself needs.
    assert found["spec"] == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1061Mi"}}}


GPU = {"limits": {"nvidia.com/gpu": 1}}
GPU_TEMPLATE = {"template": {"spec": {"containers": [{"name": "trainer", "resources": GPU}]}}}
SHARED_DEVICE = {"template": {"spec": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]}}}


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({}, "ReadWriteOnce"),
        ({"spec__phases__1__resources": {"requests": {"cpu": 8, "memory": "64Gi"}}}, "ReadWriteOnce"),
        ({"spec__scheduling": {"queue": "cpus"}}, "ReadWriteOnce"),
        ({"spec__scheduling": {"topology": {"required": "kubernetes.io/hostname"}}}, "ReadWriteOnce"),
        ({"spec__phases__1__resources": GPU}, "ReadWriteMany"),
        ({"spec__phases__1__resources": GPU, "spec__phases__1__workers": 1}, "ReadWriteOnce"),
        ({"spec__phases__0__resources": GPU}, "ReadWriteOnce"),
        ({"spec__pod": GPU_TEMPLATE}, "ReadWriteMany"),
        ({"spec__phases__1__pod": SHARED_DEVICE}, "ReadWriteMany"),
        ({"spec__network": {"rdmaResource": "rdma/hca"}}, "ReadWriteMany"),
        ({"spec__network": {"hostNetwork": True}}, "ReadWriteMany"),
        ({"spec__scheduling": {"gang": {"policy": "Volcano"}}}, "ReadWriteMany"),
        ({"spec__scheduling": {"topology": {"preferred": "topology.kubernetes.io/zone"}}}, "ReadWriteMany"),
    ],
)
def test_claim_is_for_many_nodes_only_if_the_spec_shows_that_workers_need_them(
    changes: dict[str, Any], mode: str
) -> None:
    found = claim_manifest(make_job(spec__checkpoint={}, **changes))
    assert found is not None
    assert found["spec"]["accessModes"] == [mode]


def _affinity(claims: tuple[Claim, ...], stage: Stage = TRAIN, **changes: Any) -> Json | None:
    """Return the pod affinity of a stage whose pods mount these claims."""
    job = make_job(**changes)
    made = children(job, stage, PseudoRealJobStatus(execution=3), SETTINGS, claims)[-1]
    found: Json | None = (made["spec"]["template"]["spec"].get("affinity") or {}).get("podAffinity")
    return found


MINE = "checkpoints"
"""Name of the claim that the job names."""


@pytest.mark.parametrize("modes", [("ReadWriteOnce",), ("ReadWriteOncePod",), ("ReadWriteOnce", "ReadOnlyMany")])
def test_pods_share_a_node_if_a_claim_is_for_one(modes: tuple[str, ...]) -> None:
    found = _affinity((Claim(MINE, ClaimPhase.BOUND, modes),))
    assert found is not None
    (term,) = found["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    own = {"job-uid": UID, "phase": "real", "stage": "train", "execution": "3"}
    assert term["labelSelector"]["matchLabels"] == {f"pseudoreal.dev/{key}": value for key, value in own.items()}


def test_one_claim_for_one_node_is_enough() -> None:
    many, one = Claim(MINE, ClaimPhase.BOUND, ("ReadWriteMany",)), Claim("text", ClaimPhase.BOUND, ("ReadWriteOnce",))
    assert _affinity((many, one)) is not None
    assert _affinity((many,)) is None
    assert _affinity((replace(one, modes=("ReadOnlyMany",)), many)) is None


def test_single_pods_need_no_affinity() -> None:
    one = (Claim(MINE, ClaimPhase.BOUND, ("ReadWriteOnce",)),)
    assert _affinity(one, DELINK) is None
    assert _affinity(one, spec__phases__1__workers=1) is None


def test_claim_that_an_earlier_release_made_keeps_its_pods_free() -> None:
    """The claim decides, once it exists: earlier releases asked for ReadWriteMany from two workers on."""
    own = "sim-checkpoints"
    assert _affinity((Claim(own, ClaimPhase.BOUND, ("ReadWriteMany",)),), spec__checkpoint={}) is None
    assert _affinity((Claim(own),), spec__checkpoint={}) is not None
    assert _affinity((Claim(own),), spec__checkpoint={}, spec__phases__1__resources=GPU) is None


def test_named_claim_and_object_storage_create_no_claim() -> None:
    objects = {"type": "ObjectStorage", "objectStorage": {"url": "s3://bucket/prefix"}}
    assert claim_manifest(make_job()) is None
    assert claim_manifest(make_job(spec__checkpoint={"storage": objects})) is None


def test_pods_mount_the_created_claim() -> None:
    changes: dict[str, Any] = {"spec__checkpoint": {"storage": {"volume": {}}}}
    for stage in (TRAIN, DELINK):
        volume = next(v for v in pod_of(made(stage, **changes))["volumes"] if v["name"] == "checkpoints")
        assert volume["persistentVolumeClaim"] == {"claimName": "sim-checkpoints"}
