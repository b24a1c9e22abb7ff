"""PersistentVolumeClaims that the pods of a job mount: access modes, by which a volume ties pods to one node, and why a
claim has no volume. Pure."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from pseudoreal_api.names import claim_name
from pseudoreal_api.spec.job import PseudoRealJob

from pseudoreal_operator.observe.stages import Stage, StageKind
from pseudoreal_operator.untrusted_text import sanitize

Json = dict[str, Any]

MOST_CLAIMS = 16
"""Maximum number of claims of a pod that a pass reads."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""Names that a claim can have. A volume may name any text, and a request for the claim `..` is one for another object.
"""
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
    """A PersistentVolumeClaim that pods mount. Until it has been read it counts as missing."""

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
    is_only_read: bool = False
    """Whether all volumes of the pods that name the claim say readOnly."""
    volume: str = ""
    """Name of the ephemeral volume for which the cluster makes the claim, one for each pod; empty if the pods share the
    claim."""

    @property
    def is_unbound(self) -> bool:
        return self.phase is not ClaimPhase.BOUND

    @property
    def is_for_one_node(self) -> bool:
        """Whether the volume is attached to one node at a time. A volume that many nodes can read and one can write
        (ReadOnlyMany beside ReadWriteOnce) is, unless the pods only read it."""
        for_many = {"ReadWriteMany", "ReadOnlyMany"} if self.is_only_read else {"ReadWriteMany"}
        return not {"ReadWriteOnce", "ReadWriteOncePod"}.isdisjoint(self.modes) and for_many.isdisjoint(self.modes)


def read_claim(named: Claim, body: Json) -> Claim:
    """Return the claim with what the API server says of it."""
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    annotations = metadata.get("annotations") or {}
    chosen = spec.get("storageClassName")
    return replace(
        named,
        phase=ClaimPhase(status.get("phase") or "Pending"),
        # The API server accepts a mode as often as the object has room for it.
        modes=tuple(dict.fromkeys(map(_word, status.get("accessModes") or spec.get("accessModes") or ()))),
        storage_class=None if chosen is None else _word(chosen),
        provisioner=next((_word(annotations[key]) for key in _PROVISIONERS if key in annotations), ""),
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


def mounted_claims(job: PseudoRealJob, stage: Stage) -> list[Claim]:
    """Return the claims that all pods of a stage mount, not yet read: the claim of the checkpoints, and those that the
    spec names in its volumes."""
    checkpoints = job.spec.checkpoint.storage.mounted
    is_only_read: dict[str, bool] = {}
    if checkpoints is not None:
        is_only_read[checkpoints.claim_name or claim_name(job.metadata.name)] = False
    for _, volume in _volumes(job, stage):
        claim = volume.get("persistentVolumeClaim")
        if isinstance(claim, dict):
            name = str(claim.get("claimName"))
            is_only_read[name] = is_only_read.get(name, True) and claim.get("readOnly") is True
    claims = [Claim(name, is_only_read=only) for name, only in is_only_read.items() if _NAME.fullmatch(name)]
    return claims[:MOST_CLAIMS]


def own_claims(job: PseudoRealJob, stage: Stage, pod: str) -> list[Claim]:
    """Return the claims that the cluster makes for a pod of the stage alone, not yet read."""
    named = {name: f"{pod}-{name}" for name, volume in _volumes(job, stage) if volume.get("ephemeral")}
    return [Claim(claim, volume=name) for name, claim in named.items() if _NAME.fullmatch(claim)][:MOST_CLAIMS]


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
