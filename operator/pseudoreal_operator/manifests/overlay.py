"""Overlays on the operator's pod template: the user's template, and over both the terms of placement. Pure."""

from collections.abc import Sequence
from typing import Any

from pseudoreal_api.names import LABEL_EXECUTION, LABEL_JOB_UID, LABEL_PHASE, LABEL_STAGE
from pseudoreal_api.spec.pod import Topology

Json = dict[str, Any]

HOSTNAME = "kubernetes.io/hostname"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
# mountPath comes first: a mount has the name of its volume, which may be mounted twice.
_KEYS = ("mountPath", "name")
_ADDED_TO = ("labels", "annotations", "env")


def merge(base: Any, overlay: Any) -> Any:
    """Return `base` with `overlay` laid over it. Maps merge; lists of named entries merge by name (mounts by
    mountPath); everything else is replaced."""
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
    """Return the overlay without nulls that would remove all labels, annotations or variables, including the
    operator's own. Elsewhere a null removes a value that the operator has set, such as a user id."""
    if isinstance(overlay, dict):
        kept = {key: value for key, value in overlay.items() if value is not None or key not in _ADDED_TO}
        return {key: without_nulls(value) for key, value in kept.items()}
    return [without_nulls(entry) for entry in overlay] if isinstance(overlay, list) else overlay


def with_placement(
    spec: Json,
    labels: dict[str, str],
    *,
    one_per_node: bool,
    one_node: bool,
    avoid: Sequence[str],
    topology: Topology | None,
) -> Json:
    """Return the pod spec with the operator's own placement terms beside the user's. `labels`: labels of the pods;
    `one_per_node`: each pod needs a node of its own; `one_node`: the pods of an execution need the same node; `avoid`:
    names of nodes to avoid; `topology`: how the pods of an execution stay together.

    Terms have no names by which an overlay could merge them, so they are added after the overlay.
    """
    if one_per_node:
        spec = _with_term(spec, "podAntiAffinity", _REQUIRED, _away_from_pods(labels[LABEL_JOB_UID]))
    if one_node:
        spec = _close_together(spec, labels, Topology(required=HOSTNAME))
    if topology:
        spec = _close_together(spec, labels, topology)
    if avoid:
        spec = _with_term(spec, "nodeAffinity", _PREFERRED, _away_from_nodes(avoid))
    return spec


def _with_term(spec: Json, kind: str, strength: str, term: Json) -> Json:
    affinity = spec.get("affinity") or {}
    terms = affinity.get(kind) or {}
    return spec | {"affinity": affinity | {kind: terms | {strength: [*(terms.get(strength) or []), term]}}}


def _away_from_pods(uid: str) -> Json:
    """Return the term that keeps pods away from the job's other pods; the scheduler ignores pods that have ended."""
    return {"labelSelector": {"matchLabels": {LABEL_JOB_UID: uid}}, "topologyKey": HOSTNAME}


def _close_together(spec: Json, labels: dict[str, str], topology: Topology) -> Json:
    """Return the pod spec with affinity to the other pods of the execution. Kubernetes lets the first pod go
    anywhere: the pod matches the term itself, and no other pod does. Pods of an earlier execution, which may linger,
    do not match."""
    own = {label: labels[label] for label in (LABEL_JOB_UID, LABEL_PHASE, LABEL_EXECUTION, LABEL_STAGE)}
    term = {"labelSelector": {"matchLabels": own}, "topologyKey": topology.key}
    if topology.required:
        return _with_term(spec, "podAffinity", _REQUIRED, term)
    return _with_term(spec, "podAffinity", _PREFERRED, {"weight": 100, "podAffinityTerm": term})


def _away_from_nodes(avoid: Sequence[str]) -> Json:
    # Match the node's name, because its host name label may have another value. A matchFields requirement takes a
    # single value.
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in sorted(avoid)]
    return {"weight": 100, "preference": {"matchFields": fields}}
