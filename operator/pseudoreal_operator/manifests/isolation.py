"""The NetworkPolicy of a job. Pure."""

from typing import Any

from pseudoreal_api.names import LABEL_JOB_UID, network_name
from pseudoreal_api.spec.job import PseudoRealJob

from pseudoreal_operator.manifests.objects import child, own_labels, training_pods

Json = dict[str, Any]


def is_isolated(job: PseudoRealJob) -> bool:
    """Whether the job has a NetworkPolicy. It would have no effect on pods in the network of their node."""
    return job.spec.network.isolation == "JobOnly" and not job.spec.network.host_network


def network_policy(job: PseudoRealJob) -> Json:
    """The policy: only pods of the job reach its training pods, at any port. What they themselves reach is open."""
    peers = {"podSelector": {"matchLabels": {LABEL_JOB_UID: job.metadata.uid}}}
    spec = {
        "podSelector": {"matchLabels": training_pods(job)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [peers]}],
    }
    name = network_name(job.metadata.name, job.metadata.uid)
    return child("NetworkPolicy", "networking.k8s.io/v1", job, name, own_labels(job)) | {"spec": spec}
