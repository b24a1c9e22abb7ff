"""Resources needed by a job's stages: the operator's pods, with their requests raised to the estimate. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from pseudoreal_api.names import CONTAINER
from pseudoreal_api.quantity import amount_of, readable_bytes
from pseudoreal_api.resolved.resolve import accelerators_of, rank_counts
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.spec.phase import Phase
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_operator.manifests.objects import children
from pseudoreal_operator.observe.claims import Claim
from pseudoreal_operator.observe.stages import Stage, StageKind, all_stages
from pseudoreal_operator.settings import Settings
from pseudoreal_trainer.estimate.report import PhaseReport

from pseudoreal_client.capacity.fit import PodSet
from pseudoreal_client.capacity.nodes import requests_of

Json = dict[str, Any]

_SETTINGS = Settings("trainer", "IfNotPresent", ())
"""Operator settings for rendering pods; the operator's real settings do not change the requested resources."""
_DISK = "ephemeral-storage"


@dataclass(frozen=True)
class PodNeeds:
    """Estimated needs of a phase's pod in bytes."""

    memory: int
    disk: int
    device: int
    """Bytes on each GPU of the pod; 0 without GPUs."""


def stages_left(job: PseudoRealJob, status: PseudoRealJobStatus, phase: str | None) -> list[Stage]:
    """Return the unfinished stages, or the stages of `phase`."""
    done = {one.name for one in status.phases if one.state == "Complete"}
    return [stage for stage in all_stages(job.spec) if (stage.phase == phase if phase else stage.phase not in done)]


def needs_of(job: PseudoRealJob, phase: Phase, report: PhaseReport) -> PodNeeds:
    """Return the needs of one pod of the phase, from the estimate per rank."""
    gpus, ranks = accelerators_of(job.spec, phase), rank_counts(job.spec, phase).processes_per_worker
    host, device = report.bytes.host, report.peak_device_bytes
    if gpus:
        return PodNeeds(ranks * host, ranks * report.bytes.disk, -(-ranks // gpus) * device)
    # Without a GPU, device memory is host memory.
    return PodNeeds(ranks * (host + device), ranks * report.bytes.disk, 0)


def pod_set_of(job: PseudoRealJob, stage: Stage, needs: PodNeeds | None, claims: Sequence[Claim] = ()) -> PodSet:
    """Return the pods of a stage, with each request below the estimate raised to the estimate. `claims`: known claims
    that the pods mount."""
    manifest = children(job, stage, PseudoRealJobStatus(execution=1), _SETTINGS, claims)[-1]
    spec = manifest["spec"]["template"]["spec"]
    near = job.spec.scheduling.topology if stage.kind is StageKind.TRAIN else None
    pods = PodSet(manifest["spec"]["completions"], requests_of(spec), spec, topology=near)
    if needs is None or stage.kind is StageKind.DELINK:
        return pods
    estimated = {"memory": needs.memory} | ({_DISK: needs.disk} if _is_on_node(spec) else {})
    more = {name: max(pods.requests.get(name, Fraction()), Fraction(amount)) for name, amount in estimated.items()}
    return replace(pods, requests=pods.requests | more, device_bytes=needs.device)


def _is_on_node(spec: Json) -> bool:
    """Return whether the offloaded state is on the node's own disk."""
    return any(volume["name"] == "offload" and "emptyDir" in volume for volume in spec.get("volumes") or [])


def limits_below_needs(phase: Phase, spec: Json, needs: PodNeeds) -> list[str]:
    """Return a sentence for each limit of the job that is below the estimate, with the remedy."""
    found = []
    trainer = next(one for one in spec["containers"] if one["name"] == CONTAINER)
    memory = ((trainer.get("resources") or {}).get("limits") or {}).get("memory")
    if memory is not None and amount_of(memory) < needs.memory:
        found.append(
            f"spec.phases[{phase.name}].resources.limits.memory is {memory}, but a pod needs"
            f" {readable_bytes(needs.memory)} by the forecast; raise it, or let units move to disk (offload)"
        )
    for volume in spec.get("volumes") or []:
        limit = (volume.get("emptyDir") or {}).get("sizeLimit")
        if volume["name"] == "offload" and limit is not None and amount_of(limit) < needs.disk:
            found.append(
                f"spec.phases[{phase.name}].offload.volume.emptyDir.sizeLimit is {limit}, but a pod needs"
                f" {readable_bytes(needs.disk)} of disk by the forecast; raise it"
            )
    return found


def pod_set_text(pods: PodSet) -> str:
    """Return a text such as "2 pods, each with 4 cpu, 8.00 GiB memory, 1 nvidia.com/gpu"."""
    amounts = [amount_text(name, amount) for name, amount in sorted(pods.requests.items()) if name != "pods"]
    each = f", each with {', '.join(amounts)}" if amounts else ""
    return f"{pods.count} {'pod' if pods.count == 1 else 'pods'}{each}"


def amount_text(name: str, amount: Fraction) -> str:
    if name == "memory" or name == _DISK or name.startswith("hugepages-"):
        return f"{readable_bytes(float(amount))} {name}"
    return f"{int(amount) if amount.denominator == 1 else float(amount)} {name}"
