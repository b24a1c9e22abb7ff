"""What is laid over the operator's pod template: the user's, and over both the terms of placement. Pure."""

from collections.abc import Sequence
from typing import Any

from pseudoreal_api.names import LABEL_EXECUTION, LABEL_JOB_UID, LABEL_PHASE, LABEL_STAGE
from pseudoreal_api.spec.pod import Topology

Json = dict[str, Any]

HOSTNAME = "kubernetes.io/hostname"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
# In this order: a mount has a name too, but that of its volume, which may be mounted twice.
_KEYS = ("mountPath", "name")
_ADDED_TO = ("labels", "annotations", "env")


def merge(base: Any, overlay: Any) -> Any:
    """`base` with `overlay` laid over it. Maps merge; lists of named entries merge by name (mounts by mountPath);
    everything else is replaced."""
    if isinstance(base, dict) and isinstance(overlay, dict):
        return base | {key: merge(base[key], value) if key in base else value for key, value in overlay.items()}
    if isinstance(base, list) and isinstance(overlay, list):
        key = _common_key(base + overlay)
        return _merge_named(base, overlay, key) if key else overlay
    return overlay


def _common_key(entries: list[Any]) -> str | None:
    return next((key for key in _KEYS if all(isinstance(e, dict) and key in e for e in entries)), None)


def _merge_named(base: list[Any], overlay: list[Any], key: str) -> list[Any]:
    merged = {entry[key]: entry for entry in base}
    for entry in overlay:
        merged[entry[key]] = merge(merged.get(entry[key], {}), entry)
    return list(merged.values())


def without_nulls(overlay: Any) -> Any:
    """The overlay without nulls that would take away all labels, annotations or variables, the operator's own among
    them. Elsewhere a null removes what the operator has set, such as a user id."""
    if isinstance(overlay, dict):
        kept = {key: value for key, value in overlay.items() if value is not None or key not in _ADDED_TO}
        return {key: without_nulls(value) for key, value in kept.items()}
    return [without_nulls(entry) for entry in overlay] if isinstance(overlay, list) else overlay


def place(
    spec: Json, labels: dict[str, str], *, one_per_node: bool, avoid: Sequence[str], near: Topology | None
) -> Json:
    """The pod spec with the operator's own terms beside the user's. `labels` are those of the pods, `avoid` names of
    nodes, and `near` says how the pods of an execution stay together.

    Terms have no names by which an overlay could merge them, so they are added to what it made.
    """
    if one_per_node:
        spec = _with_term(spec, "podAntiAffinity", _REQUIRED, _away_from_pods(labels[LABEL_JOB_UID]))
    if near:
        spec = _near_each_other(spec, labels, near)
    if avoid:
        spec = _with_term(spec, "nodeAffinity", _PREFERRED, _away_from_nodes(avoid))
    return spec


def _with_term(spec: Json, kind: str, strength: str, term: Json) -> Json:
    affinity = spec.get("affinity") or {}
    terms = affinity.get(kind) or {}
    return spec | {"affinity": affinity | {kind: terms | {strength: [*(terms.get(strength) or []), term]}}}


def _away_from_pods(uid: str) -> Json:
    """The term that keeps pods away from the job's other pods; those that have ended do not count to the scheduler."""
    return {"labelSelector": {"matchLabels": {LABEL_JOB_UID: uid}}, "topologyKey": HOSTNAME}


def _near_each_other(spec: Json, labels: dict[str, str], near: Topology) -> Json:
    """The spec of pods that go where the others of their execution are. Kubernetes lets the first one go anywhere: it
    matches the term itself, and no other pod does. Those of an earlier execution, which may linger, do not count."""
    own = {label: labels[label] for label in (LABEL_JOB_UID, LABEL_PHASE, LABEL_EXECUTION, LABEL_STAGE)}
    term = {"labelSelector": {"matchLabels": own}, "topologyKey": near.key}
    if near.required:
        return _with_term(spec, "podAffinity", _REQUIRED, term)
    return _with_term(spec, "podAffinity", _PREFERRED, {"weight": 100, "podAffinityTerm": term})


def _away_from_nodes(avoid: Sequence[str]) -> Json:
    # By the node's name: its label of the host name may say something else. A field is compared with one value.
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in sorted(avoid)]
    return {"weight": 100, "preference": {"matchFields": fields}}
