"""Nodes of a cluster and their free resources. Pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pseudoreal_api.names import LABEL_JOB_UID
from pseudoreal_api.quantity import amount_of

Json = dict[str, Any]
Amounts = dict[str, Fraction]
"""Resource name -> amount in bytes, cores or units."""

GPU_MEMORY = "nvidia.com/gpu.memory"
"""Node label of NVIDIA's GPU feature discovery: memory of each GPU in MiB."""
_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class Node:
    name: str
    labels: dict[str, str]
    taints: tuple[Json, ...]
    allocatable: Amounts
    used: Amounts
    """Resource name -> sum of the requests of the other pods on the node."""
    is_ready: bool = True
    is_cordoned: bool = False

    def free(self, resource: str) -> Fraction:
        return self.allocatable.get(resource, Fraction()) - self.used.get(resource, Fraction())

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of each GPU of the node in bytes; None if the label is missing."""
        said = self.labels.get(GPU_MEMORY, "")
        return int(said) * 2**20 if said.isascii() and said.isdecimal() else None


def read_nodes(nodes: Iterable[Json], pods: Iterable[Json], own: str = "") -> list[Node]:
    """Return the nodes sorted by name. Pods of the job with the uid `own` do not count as used."""
    used: dict[str, Counter[str]] = {}
    for pod in pods:
        node = pod["spec"].get("nodeName")
        labels = pod["metadata"].get("labels") or {}
        if node and pod.get("status", {}).get("phase") not in _ENDED and (not own or labels.get(LABEL_JOB_UID) != own):
            amounts: Any = requests_of(pod["spec"])
            used.setdefault(node, Counter()).update(amounts)
    return sorted((_node(body, used) for body in nodes), key=lambda node: node.name)


def _node(body: Json, used: dict[str, Counter[str]]) -> Node:
    name, spec, status = body["metadata"]["name"], body.get("spec", {}), body.get("status", {})
    ready = next((c["status"] for c in status.get("conditions") or [] if c["type"] == "Ready"), "Unknown")
    taken: Any = used.get(name, {})
    return Node(
        name=name,
        labels=body["metadata"].get("labels") or {},
        taints=tuple(spec.get("taints") or ()),
        allocatable=_amounts(status.get("allocatable")),
        used=dict(taken),
        is_ready=ready == "True",
        is_cordoned=bool(spec.get("unschedulable")),
    )


def requests_of(pod: Json) -> Amounts:
    """Return the resources reserved by the scheduler for a pod with this spec, including 1 unit of the resource
    `pods`."""
    together, first = Counter[str](), Counter[str]()
    for container in pod.get("containers") or []:
        together.update(_of_container(container))
    for container in pod.get("initContainers") or []:
        amounts = _of_container(container)
        if container.get("restartPolicy") == "Always":
            together.update(amounts)
        else:
            first |= Counter(amounts)
    total = together | first
    total.update(_amounts(pod.get("overhead")))
    return {**total, "pods": Fraction(1)}  # type: ignore[dict-item]


def _of_container(container: Json) -> Amounts:
    # A limit without a request also sets the request.
    resources = container.get("resources") or {}
    return _amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _amounts(said: Json | None) -> Amounts:
    return {name: amount_of(amount) for name, amount in (said or {}).items()}
