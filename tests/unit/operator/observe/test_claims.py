"""What a pass reads of claims and their events."""

from typing import Any

import pytest
from pseudoreal_operator.observe.claims import (
    ClaimPhase,
    are_for_one_node,
    mounted_claims,
    newest_warning,
    own_claims,
    read_claim,
)
from pseudoreal_operator.observe.stages import Stage, StageKind

from tests.unit.operator.support.world import make_job

FIRST, LAST = Stage(0, "pseudo", StageKind.TRAIN), Stage(1, "real", StageKind.TRAIN)
DELINK = Stage(1, "real", StageKind.DELINK)


@pytest.mark.parametrize(
    ("modes", "one"),
    [
        (["ReadWriteOnce"], True),
        (["ReadWriteOncePod"], True),
        (["ReadWriteOnce", "ReadOnlyMany"], True),
        (["ReadWriteMany"], False),
        (["ReadWriteOnce", "ReadWriteMany"], False),
        (["ReadOnlyMany"], False),
        ([], False),
    ],
)
def test_volume_is_for_one_node_unless_many_can_use_it(modes: list[str], one: bool) -> None:
    assert are_for_one_node(modes) is one


def claim_body(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "c", "annotations": {"volume.beta.kubernetes.io/storage-provisioner": "ebs.csi.aws.com"}},
        "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "gp3"},
        "status": status,
    }


def test_modes_of_the_volume_count_once_there_is_one() -> None:
    pending = read_claim(claim_body(phase="Pending"))
    assert (pending.phase, pending.modes, pending.storage_class) == (ClaimPhase.PENDING, ("ReadWriteOnce",), "gp3")
    assert pending.provisioner == "ebs.csi.aws.com"
    bound = read_claim(claim_body(phase="Bound", accessModes=["ReadWriteOnce", "ReadWriteMany"]))
    assert (pending.is_for_one_node, bound.is_for_one_node) == (True, False)
    assert read_claim({"metadata": {"name": "c"}}).storage_class is None


def test_newest_warning_is_told_without_harm() -> None:
    def event(message: str, kind: str = "Warning", **times: Any) -> dict[str, Any]:
        return {"type": kind, "reason": "ProvisioningFailed", "message": message} | times

    events = [
        event("old", lastTimestamp="2030-01-01T00:00:00Z"),
        event("new\x1b[31m\nline", eventTime="2030-01-01T00:00:05.000000Z", lastTimestamp=None),
        event("repeated", series={"lastObservedTime": "2030-01-01T00:00:03.000000Z"}),
        event("waits", "Normal", lastTimestamp="2030-01-01T00:00:09Z"),
    ]
    assert newest_warning(events) == "ProvisioningFailed: new␛[31m line"
    assert newest_warning([]) == newest_warning(events[3:]) == ""
    assert len(newest_warning([event("x" * 10_000)])) == 500


def test_claims_of_a_stage_are_those_that_its_pods_mount() -> None:
    volumes = [{"name": "more", "persistentVolumeClaim": {"claimName": "more"}}, {"name": "tmp", "emptyDir": {}}]
    scratch: dict[str, Any] = {"ephemeral": {"volumeClaimTemplate": {"spec": {}}}}
    job = make_job(
        spec__checkpoint={},
        spec__data={"path": "/data", "volume": {"persistentVolumeClaim": {"claimName": "text"}}},
        spec__pod={"template": {"spec": {"volumes": volumes}}},
        spec__phases__1__offload={"home": "Disk", "volume": scratch},
        spec__phases__1__pod={
            "template": {"spec": {"volumes": [{"name": "p", "persistentVolumeClaim": {"claimName": "phase"}}]}}
        },
    )
    assert mounted_claims(job, FIRST) == ["sim-checkpoints", "text", "more"]
    assert mounted_claims(job, LAST) == ["sim-checkpoints", "text", "more", "phase"]
    assert mounted_claims(job, DELINK) == ["sim-checkpoints", "text", "more"]
    assert (own_claims(job, FIRST, "p-0"), own_claims(job, LAST, "p-0")) == ([], ["p-0-offload"])


def test_number_of_claims_that_are_read_is_bounded() -> None:
    volumes = [{"name": f"v{n}", "persistentVolumeClaim": {"claimName": f"c{n}"}} for n in range(50)]
    job = make_job(spec__pod={"template": {"spec": {"volumes": volumes}}})
    assert len(mounted_claims(job, FIRST)) == 16
