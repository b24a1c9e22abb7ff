"""Requests of a job to the queue and to the scheduler: labels of its Jobs, PodGroups, and the matching fields of pods.
Pure.

The operator decides only at the creation of a Job whether the Job is suspended; afterwards only the queue decides.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from pseudoreal_api.names import gang_name
from pseudoreal_api.spec.job import PRIORITY_LABEL, QUEUE_LABEL, PseudoRealJob
from pseudoreal_api.spec.pod import GangPolicy, Scheduling, Topology

from pseudoreal_operator.observe.stages import Stage, StageKind

Json = dict[str, Any]

_REQUIRED_TOPOLOGY = "kueue.x-k8s.io/podset-required-topology"
_PREFERRED_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"

NATIVE = "scheduling.k8s.io/v1beta1"
"""API version of Kubernetes' own PodGroups, as of Kubernetes 1.37. Earlier releases had alpha versions, which are
gone."""
SCHEDULER_PLUGINS = "scheduling.x-k8s.io/v1alpha1"
"""API version of the PodGroups of scheduler-plugins, 0.19 and newer."""
VOLCANO = "scheduling.volcano.sh/v1beta1"
"""API version of Volcano's PodGroups, 1.0 and newer."""


def is_queued(scheduling: Scheduling, kind: StageKind) -> bool:
    """Return whether the Job of a stage of this kind waits in the queue. A delink takes no GPU from other jobs, so it
    waits only if spec.scheduling.queueDelink says so."""
    return scheduling.queue is not None and (kind is StageKind.TRAIN or scheduling.queue_delink)


def queue_labels(scheduling: Scheduling, kind: StageKind) -> dict[str, str]:
    """Return the labels by which Kueue manages a Job."""
    if scheduling.queue is None or not is_queued(scheduling, kind):
        return {}
    priority = scheduling.workload_priority_class_name
    return {QUEUE_LABEL: scheduling.queue} | ({PRIORITY_LABEL: priority} if priority else {})


def topology_annotations(scheduling: Scheduling) -> dict[str, str]:
    """Return the annotations of a pod template by which Kueue places its pods on nodes that are near each other."""
    topology = scheduling.topology
    if topology is None or scheduling.queue is None:
        return {}
    return {_REQUIRED_TOPOLOGY if topology.required else _PREFERRED_TOPOLOGY: topology.key}


def topology_by_affinity(scheduling: Scheduling) -> Topology | None:
    """Return the topology that pods must request by affinity; None if there is none, or if Kueue or Volcano handles
    it."""
    return None if scheduling.queue is not None or scheduling.gang.policy == "Volcano" else scheduling.topology


@dataclass(frozen=True)
class Gang:
    """The PodGroup of a phase, and the fields by which its pods join it. All executions of the phase with the same
    number of workers share one PodGroup: two executions never run at once."""

    name: str
    api_version: str
    spec: Json
    pod_labels: dict[str, str] = field(default_factory=dict)
    pod_annotations: dict[str, str] = field(default_factory=dict)
    pod_fields: Json = field(default_factory=dict)


def gang_of(job: PseudoRealJob, stage: Stage) -> Gang | None:
    """Return the gang of a stage; None if pods are scheduled one by one. A delink is one pod."""
    scheduling = job.spec.scheduling
    policy, seconds, priority = scheduling.gang.policy, scheduling.gang.timeout_seconds, scheduling.priority_class_name
    if policy == "None" or stage.kind is not StageKind.TRAIN:
        return None
    tiers = _tiers(scheduling.topology) if policy == "Volcano" and scheduling.topology else {}
    phase = job.spec.phases[stage.index]
    # Groups without tiers, and groups of a fixed size, keep the names that they had in releases without both.
    terms = f"{policy} {seconds} {priority}" + (f" {scheduling.topology}" if tiers else "")
    terms += f" {phase.workers}" if phase.elastic else ""
    name = gang_name(job.metadata.name, job.metadata.uid, stage.phase, terms)
    # The gang includes the spare pods: if there was room for fewer pods, spare pods might get the nodes of workers.
    gang = _gang(policy, name, phase.workers + phase.spares, seconds, priority)
    return replace(gang, spec=gang.spec | tiers)


def _tiers(topology: Topology) -> Json:
    """Return the topology of a Volcano group. Volcano names a tier of nodes that share a label by the label's key; in
    soft mode Volcano goes from the lowest tier up by itself."""
    if topology.required is None:
        return {"networkTopology": {"mode": "soft"}}
    return {"networkTopology": {"mode": "hard", "highestTierName": topology.required}}


def _gang(policy: GangPolicy, name: str, pods: int, seconds: int | None, priority: str | None) -> Gang:
    # The scheduler uses the priority of the group, not the priorities of its pods.
    rank = {"priorityClassName": priority} if priority else {}
    match policy:
        case "Native":
            spec: Json = {"schedulingPolicy": {"gang": {"minCount": pods}}} | rank
            return Gang(name, NATIVE, spec, pod_fields={"schedulingGroup": {"podGroupName": name}})
        case "SchedulerPlugins":
            spec = {"minMember": pods} | ({"scheduleTimeoutSeconds": seconds} if seconds else {})
            return Gang(name, SCHEDULER_PLUGINS, spec, pod_labels={"scheduling.x-k8s.io/pod-group": name})
        case "Volcano":
            spec = {"minMember": pods} | rank
            marks = {"scheduling.k8s.io/group-name": name}
            return Gang(name, VOLCANO, spec, pod_annotations=marks, pod_fields={"schedulerName": "volcano"})
        case "None":
            raise AssertionError("pods without a gang have no group")
