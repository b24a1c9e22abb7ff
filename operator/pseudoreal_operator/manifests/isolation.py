"""The NetworkPolicy of a training stage. Pure."""

from typing import Any

from pseudoreal_api.names import LABEL_JOB_UID
from pseudoreal_api.spec import PseudoRealJob

from pseudoreal_operator.manifests.objects import child, pods_of
from pseudoreal_operator.observe.observed import Run

Json = dict[str, Any]


def is_isolated(job: PseudoRealJob) -> bool:
    """A policy has no effect on pods in the network of their node."""
    return job.spec.network.isolation == "JobOnly" and not job.spec.network.host_network


def network_policy(job: PseudoRealJob, run: Run) -> Json:
    """Only pods of the job reach the pods of the run, at any port. What they themselves reach is open."""
    peers = {"podSelector": {"matchLabels": {LABEL_JOB_UID: job.metadata.uid}}}
    spec = {
        "podSelector": {"matchLabels": pods_of(job, run)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [peers]}],
    }
    return child("NetworkPolicy", "networking.k8s.io/v1", job, run) | {"spec": spec}
