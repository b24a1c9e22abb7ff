"""PersistentVolumeClaims that the pods of a job mount: access modes, by which a volume ties pods to one node, and why a
claim has no volume. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pseudoreal_api.names import claim_name
from pseudoreal_api.spec.job import PseudoRealJob

from pseudoreal_operator.observe.stages import Stage, StageKind
from pseudoreal_operator.untrusted_text import sanitize

Json = dict[str, Any]

MOST_CLAIMS = 16
"""Maximum number of claims of a pod that a pass reads."""
_WORD_CHARACTERS = 253
"""Maximum number of characters of a name or a mode."""
_COMPLAINT_CHARACTERS = 500
_PROVISIONERS = ("volume.kubernetes.io/storage-provisioner", "volume.beta.kubernetes.io/storage-provisioner")
"""Annotations by which the cluster names the provisioner of a claim's class, the newer one first."""


class ClaimPhase(StrEnum):
    MISSING = "Missing"
    PENDING = "Pending"
    BOUND = "Bound"
    LOST = "Lost"


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim, or the name of one that does not exist."""

    name: str
    phase: ClaimPhase = ClaimPhase.MISSING
    modes: tuple[str, ...] = ()
    """Access modes of the volume; without a volume, the modes that the claim asks for."""
    storage_class: str | None = None
    """None: the claim names no class, and the cluster gave it none. Empty: it takes only volumes without a class."""
    provisioner: str = ""
    """Name of the provisioner of the class; empty if the cluster has not named it."""
    complaint: str = ""
    """Newest warning about the claim, as REASON: MESSAGE; empty if there is none."""

    @property
    def is_unbound(self) -> bool:
        return self.phase in (ClaimPhase.MISSING, ClaimPhase.PENDING)

    @property
    def is_for_one_node(self) -> bool:
        """Whether only the pods of one node can use the volume."""
        return are_for_one_node(self.modes)


def are_for_one_node(modes: Iterable[str]) -> bool:
    """Return whether a volume of these access modes is attached to one node at a time. A volume that many nodes can
    read and one can write (ReadOnlyMany beside ReadWriteOnce) counts as one, because its pods may write."""
    known = {*modes}
    return bool(known & {"ReadWriteOnce", "ReadWriteOncePod"}) and "ReadWriteMany" not in known


def read_claim(body: Json, complaint: str = "") -> Claim:
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    annotations = metadata.get("annotations") or {}
    chosen = spec.get("storageClassName")
    return Claim(
        name=_word(metadata["name"]),
        phase=ClaimPhase(status.get("phase") or "Pending"),
        modes=tuple(_word(mode) for mode in status.get("accessModes") or spec.get("accessModes") or ()),
        storage_class=None if chosen is None else _word(chosen),
        provisioner=next((_word(annotations[key]) for key in _PROVISIONERS if key in annotations), ""),
        complaint=complaint,
    )


def newest_warning(events: Iterable[Json]) -> str:
    """Return the newest of the warnings, as REASON: MESSAGE; empty if there is none. Anyone in the namespace may have
    written it."""
    warnings = [event for event in events if event.get("type") == "Warning"]
    if not warnings:
        return ""
    newest = max(warnings, key=_time)
    text = f"{newest.get('reason') or 'Warning'}: {newest.get('message') or ''}"
    return sanitize(" ".join(text.split()), _COMPLAINT_CHARACTERS).rstrip(". ")


def _time(event: Json) -> str:
    repeated = (event.get("series") or {}).get("lastObservedTime")
    return str(repeated or event.get("lastTimestamp") or event.get("eventTime") or "")


def mounted_claims(job: PseudoRealJob, stage: Stage) -> list[str]:
    """Return the names of the claims that all pods of a stage mount: for checkpoints, and those that the spec names in
    its volumes."""
    found = (volume.get("persistentVolumeClaim") for _, volume in _volumes(job, stage))
    named = [
        claim["claimName"] for claim in found if isinstance(claim, dict) and isinstance(claim.get("claimName"), str)
    ]
    return list(dict.fromkeys((*_checkpoint_claim(job), *named)))[:MOST_CLAIMS]


def own_claims(job: PseudoRealJob, stage: Stage, pod: str) -> list[str]:
    """Return the names of the claims that the cluster makes for a pod of the stage alone."""
    return [f"{pod}-{name}" for name, volume in _volumes(job, stage) if volume.get("ephemeral")][:MOST_CLAIMS]


def _checkpoint_claim(job: PseudoRealJob) -> Iterator[str]:
    volume = job.spec.checkpoint.storage.mounted
    if volume is not None:
        yield volume.claim_name or claim_name(job.metadata.name)


def _volumes(job: PseudoRealJob, stage: Stage) -> Iterator[tuple[str, Json]]:
    """Yield name and source of the volumes that the spec names for the pods of a stage."""
    spec, phase = job.spec, job.spec.phases[stage.index]
    if spec.data.volume:
        yield "data", spec.data.volume
    start = spec.checkpoint.start_from
    if stage.kind is StageKind.TRAIN and stage.index == 0 and start and start.mounted and start.mounted.volume:
        yield "weights", start.mounted.volume
    if stage.kind is StageKind.TRAIN and phase.offload.may_use_disk and phase.offload.volume:
        yield "offload", phase.offload.volume
    templates = [spec.pod.template, *([phase.pod.template] if stage.kind is StageKind.TRAIN else [])]
    for template in templates:
        pod = template.get("spec")
        volumes = pod.get("volumes") if isinstance(pod, dict) else None
        for volume in volumes if isinstance(volumes, list) else []:
            if isinstance(volume, dict):
                yield str(volume.get("name")), volume


def _word(text: Any) -> str:
    return sanitize(str(text), _WORD_CHARACTERS)
