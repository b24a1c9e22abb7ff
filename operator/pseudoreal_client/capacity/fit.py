"""Computes whether equal pods fit onto nodes, and the obstacles on each node. Pure.

A node takes as many pods as its scarcest resource allows. Placement constraints beyond one pod per node, one node for
all pods and the job's topology are left to the scheduler.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pseudoreal_api.names import LABEL_JOB_UID
from pseudoreal_api.spec.pod import Topology

from pseudoreal_client.capacity.nodes import Amounts, Node

Json = dict[str, Any]

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_HOST_NAME = "kubernetes.io/hostname"
_HARD = ("NoSchedule", "NoExecute")


@dataclass(frozen=True)
class PodSet:
    """Equal pods to be placed; `spec` is the pod spec of each."""

    count: int
    requests: Amounts
    spec: Json
    device_bytes: int = 0
    """Bytes needed by the ranks of a pod on each GPU."""
    topology: Topology | None = None
    """Topology constraint of spec.scheduling; None if there is none."""

    @property
    def is_one_per_node(self) -> bool:
        """Whether at most one of the pods may run on a node."""
        terms = self._affinity("podAntiAffinity").get(_REQUIRED) or []
        return any(term.get("topologyKey") == _HOST_NAME for term in terms)

    @property
    def is_on_one_node(self) -> bool:
        """Whether the operator keeps the pods on one node, because only one node can have the volume of a claim."""
        terms = self._affinity("podAffinity").get(_REQUIRED) or []
        own = (term for term in terms if LABEL_JOB_UID in ((term.get("labelSelector") or {}).get("matchLabels") or {}))
        return any(term["topologyKey"] == _HOST_NAME for term in own)

    def _affinity(self, kind: str) -> Json:
        return (self.spec.get("affinity") or {}).get(kind) or {}

    @property
    def node_terms(self) -> list[Json]:
        """Required terms of the node affinity: a node must match at least one. Empty if there are none."""
        terms: list[Json] = (self._affinity("nodeAffinity").get(_REQUIRED) or {}).get("nodeSelectorTerms") or []
        return terms


@dataclass(frozen=True)
class Fit:
    """Room for the pods.

    `now`: node -> number of pods that fit beside the running pods. `ever`: node -> number of pods that fit on the empty
    node.
    """

    wanted: int
    now: dict[str, int]
    ever: dict[str, int]
    obstacles: dict[str, str] = field(default_factory=dict)
    """Node -> reason why no pod fits there now; pods may fit if the node is empty."""
    domains: dict[str, str] = field(default_factory=dict)
    """Node -> its topology domain. With a claim that keeps all pods on one node, each node is a domain of its own; with
    neither a topology nor such a claim, the mapping is empty."""
    is_in_one_domain: bool = False
    """Whether all pods must be in one domain."""

    @property
    def fits_now(self) -> bool:
        return self.room_now >= self.wanted

    @property
    def fits_ever(self) -> bool:
        return self.room_ever >= self.wanted

    @property
    def room_now(self) -> int:
        return self._room(self.now)

    @property
    def room_ever(self) -> int:
        return self._room(self.ever)

    @property
    def placement(self) -> dict[str, int]:
        """Node -> number of pods, if nodes are filled one after the other. With a topology, the domain with the most
        room comes first."""
        room, left = self._of_domains(self.now), self.wanted
        order = sorted(room, key=lambda domain: -room[domain])
        placed: dict[str, int] = {}
        for domain in order[:1] if self.is_in_one_domain else order:
            for node in (node for node in self.now if self._domain(node) == domain):
                placed[node] = min(self.now[node], left)
                left -= placed[node]
        return {node: count for node, count in placed.items() if count}

    def _room(self, rooms: dict[str, int]) -> int:
        of_domains = self._of_domains(rooms).values()
        return max(of_domains, default=0) if self.is_in_one_domain else sum(of_domains)

    def _of_domains(self, rooms: dict[str, int]) -> Counter[str]:
        """Return the room of each domain."""
        found: Counter[str] = Counter()
        for node, room in rooms.items():
            found[self._domain(node)] += room
        return found

    def _domain(self, node: str) -> str:
        return self.domains.get(node, "")


def fit(nodes: Sequence[Node], pods: PodSet) -> Fit:
    """Return how many of the pods fit on each node."""
    now: dict[str, int] = {}
    ever: dict[str, int] = {}
    obstacles: dict[str, str] = {}
    for node in nodes:
        barrier = _exclusion(node, pods)
        ever[node.name] = 0 if barrier else _room(node, pods, empty=True)
        now[node.name] = 0 if barrier else _room(node, pods, empty=False)
        if not now[node.name]:
            obstacles[node.name] = barrier or _shortage(node, pods)
    if pods.is_on_one_node:
        return Fit(pods.count, now, ever, obstacles, {node.name: node.name for node in nodes}, is_in_one_domain=True)
    near = pods.topology
    domains = {node.name: node.labels.get(near.key, "") for node in nodes} if near else {}
    return Fit(pods.count, now, ever, obstacles, domains, near is not None and near.required is not None)


def _room(node: Node, pods: PodSet, *, empty: bool) -> int:
    rooms = [
        (node.allocatable.get(name, 0) if empty else node.free(name)) // amount
        for name, amount in pods.requests.items()
        if amount
    ]
    room = max(0, min([pods.count, *map(int, rooms)]))
    return min(room, 1) if pods.is_one_per_node else room


def _shortage(node: Node, pods: PodSet) -> str:
    short = [name for name, amount in pods.requests.items() if node.free(name) < amount]
    never = [name for name in short if node.allocatable.get(name, 0) < pods.requests[name]]
    if missing := [name for name in never if not node.allocatable.get(name)]:
        return f"no {', '.join(missing)}"
    return f"too little {', '.join(never)}" if never else f"too little {', '.join(short)} left"


def _exclusion(node: Node, pods: PodSet) -> str | None:
    """Return why the node can take none of the pods, regardless of free resources; None if it can."""
    if node.is_cordoned:
        return "cordoned"
    if not node.is_ready:
        return "not ready"
    if taint := next((t for t in node.taints if t["effect"] in _HARD and not _is_tolerated(t, pods.spec)), None):
        value = f"={taint['value']}" if taint.get("value") else ""
        return f"taint {taint['key']}{value}:{taint['effect']}, which pod.template does not tolerate"
    if not _is_selected(node, pods):
        return "not selected by the nodeSelector or the node affinity of pod.template"
    if pods.topology and pods.topology.required and pods.topology.required not in node.labels:
        return f"no label {pods.topology.required}, which spec.scheduling.topology requires"
    if node.gpu_bytes is not None and node.gpu_bytes < pods.device_bytes:
        return "GPUs with too little memory"
    return None


def _is_tolerated(taint: Json, spec: Json) -> bool:
    return any(_tolerates(toleration, taint) for toleration in spec.get("tolerations") or [])


def _tolerates(toleration: Json, taint: Json) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    has_key: bool = toleration.get("key") == taint["key"]
    return has_key and (toleration.get("value") or "") == (taint.get("value") or "")


def _is_selected(node: Node, pods: PodSet) -> bool:
    wanted = pods.spec.get("nodeSelector") or {}
    if any(node.labels.get(key) != value for key, value in wanted.items()):
        return False
    return not pods.node_terms or any(_matches_term(node, term) for term in pods.node_terms)


def _matches_term(node: Node, term: Json) -> bool:
    labels, fields = term.get("matchExpressions") or [], term.get("matchFields") or []
    if not labels and not fields:
        return False
    return all(_matches(node.labels, one) for one in labels) and all(
        _matches({"metadata.name": node.name}, one) for one in fields
    )


def _matches(labels: dict[str, str], expression: Json) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            if value is None or not value.isdecimal():
                return False
            return int(value) > int(values[0]) if operator == "Gt" else int(value) < int(values[0])
        case _:
            return False
