"""Claims for which pods wait: what the condition says, and when the operator looks again."""

from dataclasses import replace
from typing import Any

import pytest
from pseudoreal_operator.lifecycle.plan import Plan, plan
from pseudoreal_operator.observe.claims import Claim, ClaimPhase
from pseudoreal_operator.status.conditions import find

from tests.unit.operator.support.world import SETTINGS, World, make_job

UNBOUND = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: not helpful"
LATE = 'running PreBind plugin "VolumeBinding": binding volumes: context deadline exceeded'
TOO_FEW = "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) didn't match pod affinity rules."
REFUSALS = {
    "rancher.io/local-path": 'ProvisioningFailed: failed to provision volume with StorageClass "standard": NodePath'
    " only supports ReadWriteOnce and ReadWriteOncePod (1.22+) access modes",
    "ebs.csi.aws.com": 'ProvisioningFailed: failed to provision volume with StorageClass "gp3": rpc error: code ='
    " InvalidArgument desc = Volume capabilities MULTI_NODE_MULTI_WRITER not supported. Only AccessModes[ReadWriteOnce]"
    " supported",
    "pd.csi.storage.gke.io": "ProvisioningFailed: rpc error: desc = VolumeCapabilities is invalid",
    "disk.csi.azure.com": "ProvisioningFailed: mountVolume is not supported for access mode: MULTI_NODE_MULTI_WRITER",
}
OWN, NAMED = "sim-checkpoints", "mine"
PENDING = Claim(OWN, ClaimPhase.PENDING, ("ReadWriteMany",), "standard", "rancher.io/local-path")


def waiting_world(said: str | None = UNBOUND, claim: str | None = None, **changes: Any) -> World:
    """Return a world in which the two pods of the first phase wait for a node. `said`: message of the scheduler; None:
    it has said nothing. `claim`: claim that the spec names; None: the operator makes one."""
    storage: dict[str, Any] = {"storage": {"volume": {"claimName": claim}}} if claim else {}
    world = World(make_job(spec__checkpoint=storage, spec__phases__0__workers=2, **changes))
    world.settle()
    world.control()
    for pod in world.alive() if said else ():
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said}
        pod["status"]["conditions"] = [condition]
    return world


def plan_with(world: World, *claims: Claim) -> Plan:
    return plan(replace(world.observe(), claims=claims), world.now, SETTINGS)


def condition(world: World, *claims: Claim) -> tuple[str, str, str]:
    """Return status, reason and message of the condition Progressing."""
    found = find(plan_with(world, *claims).status, "Progressing")
    assert found
    return found.status, found.reason, found.message


@pytest.mark.parametrize("provisioner", REFUSALS)
@pytest.mark.parametrize("said", [UNBOUND, LATE, None])
def test_refused_access_mode_of_the_operators_claim_names_class_mode_and_line(
    said: str | None, provisioner: str
) -> None:
    claim = replace(PENDING, provisioner=provisioner, complaint=REFUSALS[provisioner])
    status, reason, text = condition(waiting_world(said), claim)
    assert (status, reason) == ("False", "Unschedulable" if said else "ClaimPending")
    assert f"asks for ReadWriteMany, which its storage class standard ({provisioner}) does not have" in text
    assert REFUSALS[provisioner] in text
    assert "spec.checkpoint.storage.volume.claimTemplate.spec.accessModes: [ReadWriteOnce]" in text
    assert "kubectl delete prj sim -n default, kubectl delete pvc sim-checkpoints -n default" in text
    assert "free or add the resources that the scheduler misses" not in text


def test_refused_access_mode_of_a_users_claim_names_the_line_of_the_claim() -> None:
    world = waiting_world(claim=NAMED)
    claim = replace(PENDING, name=NAMED, complaint=REFUSALS["rancher.io/local-path"])
    text = condition(world, claim)[2]
    assert "accessModes: [ReadWriteOnce] in the spec of claim mine" in text
    assert "kubectl delete pvc mine -n default, apply its changed file, and kubectl delete job sim-pseudo-" in text
    assert "claimTemplate" not in text


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        (replace(PENDING, storage_class=None, provisioner=""), "the cluster has no default class"),
        (
            replace(PENDING, complaint='ProvisioningFailed: storageclass.storage.k8s.io "standard" not found'),
            "from storage class standard, which does not exist",
        ),
        (
            replace(PENDING, complaint="ProvisioningFailed: exceeded quota: requests.storage, used 1Ti"),
            "has not created the volume: ProvisioningFailed: exceeded quota: requests.storage, used 1Ti. What to do:",
        ),
        (Claim(OWN), "Claim sim-checkpoints was deleted. What to do: kubectl delete job sim-pseudo-"),
        (replace(PENDING, phase=ClaimPhase.LOST), "The volume of claim sim-checkpoints was deleted"),
    ],
)
def test_claim_that_cannot_bind_is_explained_without_a_word_of_the_scheduler(claim: Claim, says: str) -> None:
    status, reason, text = condition(waiting_world(None), claim)
    assert (status, reason) == ("False", "ClaimPending")
    assert says in text


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        (PENDING, "If this lasts, see whether provisioner rancher.io/local-path runs: kubectl describe pvc"),
        (replace(PENDING, storage_class=""), "waits for a PersistentVolume without a class"),
    ],
)
def test_claim_that_may_still_bind_is_no_blocker_until_the_scheduler_says_so(claim: Claim, says: str) -> None:
    assert condition(waiting_world(None), claim)[1] == "Starting"
    assert says in condition(waiting_world(UNBOUND), claim)[2]


def test_missing_claim_of_the_user_is_to_be_created() -> None:
    said = 'persistentvolumeclaim "mine" not found. not found'
    text = condition(waiting_world(said, claim=NAMED), Claim(NAMED))[2]
    assert "Claim mine does not exist. What to do: create it" in text


def test_claim_whose_volume_was_deleted_is_named() -> None:
    said = 'persistentvolumeclaim "sim-checkpoints" bound to non-existent persistentvolume "pv-1"'
    text = condition(waiting_world(said), replace(PENDING, phase=ClaimPhase.LOST))[2]
    assert "The volume of claim sim-checkpoints was deleted" in text


@pytest.mark.parametrize("claim", [replace(PENDING, phase=ClaimPhase.BOUND), Claim("x", ClaimPhase.BOUND)])
def test_bound_claim_is_not_blamed_for_other_blockers(claim: Claim) -> None:
    said = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu"
    text = condition(waiting_world(said), claim)[2]
    assert "Claim" not in text
    assert "free or add the resources that the scheduler misses" in text


def test_pods_that_do_not_fit_on_one_node_are_told_why_they_need_one() -> None:
    bound = replace(PENDING, phase=ClaimPhase.BOUND, modes=("ReadWriteOnce",))
    text = condition(waiting_world(TOO_FEW), bound)[2]
    assert "Claim sim-checkpoints is ReadWriteOnce: only one node at a time can mount its volume" in text
    assert "so all 2 pods must run on one node" in text
    assert "storageClassName: CLASS and accessModes: [ReadWriteMany]" in text
    assert "kubectl delete pvc sim-checkpoints -n default (with what is on it)" in text
    hosts = condition(waiting_world(TOO_FEW, spec__network={"hostNetwork": True}), bound)[2]
    assert "With spec.network.hostNetwork each pod needs a node of its own" in hosts
    pod = "0/1 nodes are available: 1 node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod"
    alone = replace(bound, modes=("ReadWriteOncePod",))
    assert "only one pod at a time can mount its volume, and the phase has 2" in condition(waiting_world(pod), alone)[2]


@pytest.mark.parametrize(
    "conflict", ["didn't match PersistentVolume's node affinity", "had volume node affinity conflict"]
)
def test_volume_of_another_node_is_named(conflict: str) -> None:
    world = waiting_world(f"0/3 nodes are available: 1 Insufficient cpu, 2 node(s) {conflict}.")
    many, one = (replace(PENDING, phase=ClaimPhase.BOUND, modes=(f"ReadWrite{mode}",)) for mode in ("Many", "Once"))
    assert "The volume of claim sim-checkpoints can be mounted only in the node or zone" in condition(world, many)[2]
    assert "so all 2 pods must run on one node" in condition(world, one)[2]


def test_affinity_of_another_origin_is_not_blamed_on_a_volume() -> None:
    """The scheduler gives the same message if a topology or the user's template keeps the pods together."""
    world = waiting_world(TOO_FEW, spec__scheduling={"topology": {"required": "topology.kubernetes.io/zone"}})
    scratch = Claim("sim-pseudo-e1-0-scratch", ClaimPhase.BOUND, ("ReadWriteOnce",), volume="scratch")
    text = condition(world, replace(PENDING, phase=ClaimPhase.BOUND), scratch)[2]
    assert "Claim" not in text
    assert "volume" not in text
    assert "free or add the resources that the scheduler misses" in text


def test_claim_of_an_ephemeral_volume_is_explained_by_the_line_of_the_job() -> None:
    scratch = Claim("sim-pseudo-e1-0-scratch", volume="scratch")
    assert condition(waiting_world(None), scratch)[1] == "Starting", "the cluster makes it a moment after the pod"
    absent = condition(waiting_world('persistentvolumeclaim "sim-pseudo-e1-0-scratch" not found'), scratch)[2]
    assert "has not yet created claim sim-pseudo-e1-0-scratch of volume scratch" in absent
    assert "kubectl describe pod sim-pseudo-e1-0 -n default." in absent
    said = 'ProvisioningFailed: storageclass.storage.k8s.io "fsat" not found'
    wrong = replace(scratch, phase=ClaimPhase.PENDING, modes=("ReadWriteOnce",), storage_class="fsat", complaint=said)
    text = condition(waiting_world(), wrong)[2]
    assert "storageClassName: CLASS in the volumeClaimTemplate of the job's volume scratch" in text
    assert "This needs a new job: kubectl delete prj sim -n default, and apply the changed file." in text
    assert "kubectl delete pvc" not in text


def test_operator_looks_again_at_an_unbound_claim_with_growing_waits() -> None:
    world = waiting_world()
    world.settle()
    waits = []
    for _ in range(9):
        wait = plan_with(world, PENDING).requeue_after
        assert wait is not None
        waits.append(wait)
        world.tick(wait)
    assert waits[:5] == [5, 5, 10, 20, 40]
    assert max(waits) == 300
    bound = plan_with(world, replace(PENDING, phase=ClaimPhase.BOUND)).requeue_after
    assert bound is not None
    assert bound > 300, "the deadline of the start alone"
