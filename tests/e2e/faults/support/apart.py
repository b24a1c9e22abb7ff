"""Pod template for spreading the pods of a job over two nodes, one of them at risk."""

from typing import Any

Json = dict[str, Any]


def apart(job: str) -> Json:
    """Return a pod template with preferred anti-affinity; its pods tolerate a lost node for one second instead of the
    usual five minutes."""
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
