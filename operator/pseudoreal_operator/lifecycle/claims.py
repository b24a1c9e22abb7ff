"""Claims for which pods wait: what is wrong with them, and which line to change. Pure.

The operator reads the claim and its events. It reads neither classes nor nodes, so what a class can do is what its
provisioner has said about the claim.
"""

import re

from pseudoreal_api.names import claim_name

from pseudoreal_operator.observe.claims import Claim, ClaimPhase
from pseudoreal_operator.observe.view import View

_MANY = "ReadWriteMany"
_OF_MODES = re.compile(r"access[ _-]?modes?|multi[ _]?node|volume ?capabilit", re.IGNORECASE)
"""Words by which provisioners refuse an access mode: local-path ("NodePath only supports ReadWriteOnce and
ReadWriteOncePod (1.22+) access modes"), AWS EBS ("Volume capabilities MULTI_NODE_MULTI_WRITER not supported"), GCE PD
("VolumeCapabilities is invalid"), Azure Disk ("not supported for access mode: MULTI_NODE_MULTI_WRITER")."""
_OF_CLASS = re.compile(r"storageclass\S* .*not found", re.IGNORECASE)
_TEMPLATE = "spec.checkpoint.storage.volume.claimTemplate.spec"


def claims_that_cannot_bind(view: View) -> list[str]:
    """Return a sentence with a remedy for each claim that stays without a volume unless something is changed."""
    return [sentence for claim in view.observed.claims if (sentence := _why_it_cannot_bind(view, claim))]


def unbound_claims(view: View) -> list[str]:
    """Return a sentence on each claim without a volume."""
    return [
        _why_it_cannot_bind(view, claim) or _while_it_is_made(view, claim)
        for claim in view.observed.claims
        if claim.is_unbound
    ]


def one_node_sentence(view: View) -> str | None:
    """Return a sentence on the claim that keeps the pods on one node; None if no claim does."""
    shared = (claim for claim in view.observed.claims if not claim.volume)
    claim = next((claim for claim in shared if claim.is_for_one_node), None)
    if claim is None or view.workers == 1:
        return None
    text = (
        f"Claim {claim.name} is {', '.join(claim.modes)}: only one node at a time can mount its volume, so all"
        f" {view.workers} pods must run on one node."
    )
    if "ReadWriteOncePod" in claim.modes:
        text = (
            f"Claim {claim.name} is ReadWriteOncePod: only one pod at a time can mount its volume, and the"
            f" phase has {view.workers}."
        )
        remedy = f"write {_line(view, claim, 'accessModes: [ReadWriteOnce]')}"
    elif view.spec.network.host_network:
        text += " With spec.network.hostNetwork each pod needs a node of its own, so they cannot start."
        remedy = "set hostNetwork to false, or " + _for_many(view, claim)
    else:
        remedy = f"make room for them on one node that can mount the volume, or {_for_many(view, claim)}"
    return f"{text} What to do: {remedy}. {_replacing(view, claim)}"


def volume_elsewhere_sentence(view: View) -> str | None:
    """Return a sentence on claims whose volumes only some nodes can have; None if no claim has a volume."""
    names = [claim.name for claim in view.observed.claims if claim.phase is ClaimPhase.BOUND]
    if not names:
        return None
    return (
        f"The volume of claim {' or '.join(names)} can be mounted only in the node or zone in which it was created"
        " (kubectl get pv shows its node affinity), and the pods fit only on other nodes."
    )


def _why_it_cannot_bind(view: View, claim: Claim) -> str | None:
    where, describe = f"-n {view.metadata.namespace}", f"kubectl describe pvc {claim.name} -n {view.metadata.namespace}"
    if claim.phase is ClaimPhase.MISSING:
        if claim.volume:
            return None
        if _is_made(view, claim):
            return (
                f"Claim {claim.name} was deleted. What to do: kubectl delete job {view.job_name} {where}; the"
                " operator then creates the claim and the pods again."
            )
        return f"Claim {claim.name} does not exist. What to do: create it; the pods then start by themselves."
    if claim.phase is ClaimPhase.LOST:
        return f"The volume of claim {claim.name} was deleted, with all data on it ({describe})."
    if claim.phase is not ClaimPhase.PENDING:
        return None
    asked = f"Claim {claim.name} asks for {', '.join(claim.modes)}"
    if claim.storage_class is None:
        return (
            f"{asked} and names no storage class, and the cluster has no default class. What to do: make a class the"
            f" default one (kubectl get storageclass), and the claim gets it; or write"
            f" {_line(view, claim, 'storageClassName: CLASS')}. {_replacing(view, claim)}"
        )
    if not claim.complaint:
        return None
    if _OF_CLASS.search(claim.complaint):
        return (
            f"{asked} from storage class {claim.storage_class}, which does not exist. What to do: create it, or write"
            f" {_line(view, claim, 'storageClassName: CLASS')} with one that does (kubectl get storageclass)."
            f" {_replacing(view, claim)}"
        )
    if _MANY in claim.modes and _OF_MODES.search(claim.complaint):
        return (
            f"{asked}, which its storage class {_class(claim)} does not have: {claim.complaint}. What to do: write"
            f" {_line(view, claim, 'accessModes: [ReadWriteOnce]')}, and all pods run on one node; or"
            f" {_for_many(view, claim)}. {_replacing(view, claim)}"
        )
    return (
        f"{asked}, and its storage class {_class(claim)} has not created the volume: {claim.complaint}. What to do:"
        f" correct the cause that this message names ({describe})."
    )


def _while_it_is_made(view: View, claim: Claim) -> str:
    if claim.phase is ClaimPhase.MISSING:
        return (
            f"The cluster has not yet created claim {claim.name} of volume {claim.volume}. If this lasts, the events"
            f" of the pod say why: kubectl describe pod {claim.name.removesuffix(f'-{claim.volume}')} -n"
            f" {view.metadata.namespace}."
        )
    if claim.storage_class == "":
        return (
            f"Claim {claim.name} waits for a PersistentVolume without a class that has its size and"
            f" {', '.join(claim.modes)}. What to do: create one."
        )
    asker = f"provisioner {claim.provisioner}" if claim.provisioner else "its provisioner"
    return (
        f"Claim {claim.name} asks for {', '.join(claim.modes)} from storage class {claim.storage_class}, and has no"
        f" volume yet. If this lasts, see whether {asker} runs: kubectl describe pvc {claim.name}"
        f" -n {view.metadata.namespace}."
    )


def _class(claim: Claim) -> str:
    return f"{claim.storage_class} ({claim.provisioner})" if claim.provisioner else f"{claim.storage_class}"


def _is_made(view: View, claim: Claim) -> bool:
    """Return whether the operator makes the claim."""
    volume = view.spec.checkpoint.storage.mounted
    return volume is not None and volume.claim_name is None and claim.name == claim_name(view.metadata.name)


def _line(view: View, claim: Claim, line: str) -> str:
    """Return where a line of the claim's spec is written."""
    if claim.volume:
        return f"{line} in the volumeClaimTemplate of the job's volume {claim.volume}"
    return f"{_TEMPLATE}.{line}" if _is_made(view, claim) else f"{line} in the spec of claim {claim.name}"


def _for_many(view: View, claim: Claim) -> str:
    """Return how to get a volume for several nodes."""
    line = _line(view, claim, "storageClassName: CLASS")
    modes = "" if _MANY in claim.modes else f" and accessModes: [{_MANY}]"
    return f"{line}{modes} with a class whose volumes several nodes can mount, or keep checkpoints in object storage"


def _replacing(view: View, claim: Claim) -> str:
    """Return how a changed line takes effect: the spec of a claim is immutable, and so is the template in the job."""
    where = f"-n {view.metadata.namespace}"
    delete_job = f"kubectl delete prj {view.metadata.name} {where}"
    if claim.volume:
        return f"This needs a new job: {delete_job}, and apply the changed file."
    delete = f"kubectl delete pvc {claim.name} {where}"
    delete += " (with what is on it)" if claim.phase is ClaimPhase.BOUND else ""
    if _is_made(view, claim):
        return f"This needs a new job: {delete_job}, {delete}, and apply the changed file."
    made = f"kubectl delete job {view.job_name} {where}, so that the operator creates pods for it"
    return f"This needs a new claim: {delete}, apply its changed file, and {made}."
