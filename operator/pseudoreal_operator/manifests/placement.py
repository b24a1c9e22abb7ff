"""Which nodes the pods of an execution may, and would rather, run on. Pure."""

from collections.abc import Sequence
from typing import Any

from pseudoreal_api.names import LABEL_JOB_UID

Json = dict[str, Any]

HOSTNAME = "kubernetes.io/hostname"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def place(spec: Json, uid: str, *, one_per_node: bool, avoid: Sequence[str]) -> Json:
    """The pod spec with the operator's own terms beside the user's. `avoid` are names of nodes.

    Terms have no names by which an overlay could merge them, so they are added to what it made.
    """
    if one_per_node:
        spec = _with_term(spec, "podAntiAffinity", _REQUIRED, _away_from_pods(uid))
    if avoid:
        spec = _with_term(spec, "nodeAffinity", _PREFERRED, _away_from_nodes(avoid))
    return spec


def _with_term(spec: Json, kind: str, strength: str, term: Json) -> Json:
    affinity = spec.get("affinity") or {}
    terms = affinity.get(kind) or {}
    return spec | {"affinity": affinity | {kind: terms | {strength: [*(terms.get(strength) or []), term]}}}


def _away_from_pods(uid: str) -> Json:
    """Pods that have ended do not count to the scheduler."""
    return {"labelSelector": {"matchLabels": {LABEL_JOB_UID: uid}}, "topologyKey": HOSTNAME}


def _away_from_nodes(avoid: Sequence[str]) -> Json:
    # By the node's name: its label of the host name may say something else. A field is compared with one value.
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in sorted(avoid)]
    return {"weight": 100, "preference": {"matchFields": fields}}
