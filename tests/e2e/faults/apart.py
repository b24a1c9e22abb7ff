"""Pods of one job on two nodes, one of which may be lost."""

from typing import Any

Json = dict[str, Any]


def apart(job: str) -> Json:
    """A pod template: the pods keep apart where they can, and leave a node that is lost for a second; usual are five
    minutes."""
    selector = {"matchLabels": {"pseudoreal.dev/job-name": job}}
    term = {"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    lost = {
        "key": "node.kubernetes.io/unreachable",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 1,
    }
    affinity = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    return {"spec": {"affinity": affinity, "tolerations": [lost]}}
