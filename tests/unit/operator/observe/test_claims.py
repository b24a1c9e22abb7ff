"""What a pass reads of claims and their events."""

from typing import Any

import pytest
from pseudoreal_operator.observe.claims import (
    Claim,
    ClaimPhase,
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
    assert Claim("c", modes=tuple(modes)).is_for_one_node is one


@pytest.mark.parametrize(("modes", "one"), [(("ReadWriteOnce",), True), (("ReadWriteOnce", "ReadOnlyMany"), False)])
def test_volume_that_pods_only_read_is_for_many_nodes_if_many_can_read_it(modes: tuple[str, ...], one: bool) -> None:
    assert Claim("c", modes=modes, is_only_read=True).is_for_one_node is one


def claim_body(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "c", "annotations": {"volume.beta.kubernetes.io/storage-provisioner": "ebs.csi.aws.com"}},
        "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "gp3"},
        "status": status,
    }


def test_modes_of_the_volume_count_once_there_is_one() -> None:
    pending = read_claim(Claim("c"), claim_body(phase="Pending"))
    assert (pending.phase, pending.modes, pending.storage_class) == (ClaimPhase.PENDING, ("ReadWriteOnce",), "gp3")
    assert pending.provisioner == "ebs.csi.aws.com"
    bound = read_claim(Claim("c"), claim_body(phase="Bound", accessModes=["ReadWriteOnce", "ReadWriteMany"]))
    assert (pending.is_for_one_node, bound.is_for_one_node) == (True, False)
    assert read_claim(Claim("c"), {"metadata": {"name": "c"}}).storage_class is None


def test_mode_that_a_claim_repeats_counts_once() -> None:
    body = claim_body(phase="Pending", accessModes=["ReadWriteOnce"] * 50_000)
    assert read_claim(Claim("c"), body).modes == ("ReadWriteOnce",)


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
    assert names(mounted_claims(job, FIRST)) == ["sim-checkpoints", "text", "more"]
    assert names(mounted_claims(job, LAST)) == ["sim-checkpoints", "text", "more", "phase"]
    assert names(mounted_claims(job, DELINK)) == ["sim-checkpoints", "text", "more"]
    assert own_claims(job, FIRST, "p-0") == []
    assert own_claims(job, LAST, "p-0") == [Claim("p-0-offload", volume="offload")]


def names(claims: list[Claim]) -> list[str]:
    return [claim.name for claim in claims]


def claim_volume(name: str, claim: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "persistentVolumeClaim": {"claimName": claim} | more}


def test_claim_is_only_read_if_no_volume_of_the_pods_writes_it() -> None:
    volumes = [claim_volume("a", "text", readOnly=True), claim_volume("b", "both", readOnly=True)]
    volumes += [claim_volume("c", "both"), claim_volume("d", "sim-checkpoints", readOnly=True)]
    job = make_job(spec__checkpoint={}, spec__pod={"template": {"spec": {"volumes": volumes}}})
    found = {claim.name: claim.is_only_read for claim in mounted_claims(job, FIRST)}
    assert found == {"sim-checkpoints": False, "text": True, "both": False}


@pytest.mark.parametrize("name", ["", ".", "..", "../pods", "Text", "a" * 254, None])
def test_name_that_no_claim_has_is_not_asked_for(name: Any) -> None:
    """The API server answers a request for an empty name with a list, and a request for `..` with another object."""
    job = make_job(spec__checkpoint={}, spec__pod={"template": {"spec": {"volumes": [claim_volume("v", name)]}}})
    assert names(mounted_claims(job, FIRST)) == ["sim-checkpoints"]


def test_number_of_claims_that_are_read_is_bounded() -> None:
    volumes = [{"name": f"v{n}", "persistentVolumeClaim": {"claimName": f"c{n}"}} for n in range(50)]
    job = make_job(spec__pod={"template": {"spec": {"volumes": volumes}}})
    assert len(mounted_claims(job, FIRST)) == 16
