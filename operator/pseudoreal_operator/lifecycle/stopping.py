"""Pods that are ended early: pods of doomed executions, replaced pods, and pods that only a sidecar keeps. Pure.

An execution is doomed if its ranks can neither train nor save together any more. A checkpoint needs all ranks: once one
of them cannot take part, the grace period of the others is of no use, and holds up the next execution.

A sidecar is a container that keeps running after the trainer has ended, such as an injected proxy. For the job, the end
of the trainer is the end of the pod. For Kubernetes the pod still runs: the pod holds its node, and its Job never
completes. So the operator ends these pods, once the status has all information from them.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_api.wire.messages import ExitCode

from pseudoreal_operator.failures.classify import can_another_pod_succeed, classify, has_exit_code, has_lost_peer
from pseudoreal_operator.lifecycle.clocks import ORIGIN_SECONDS, SPARE_SECONDS, is_ending_soon, is_stuck
from pseudoreal_operator.observe.stages import Execution, current_stage
from pseudoreal_operator.observe.view import ChildJob, Observed, Pod, Pods, View, ended_at, is_kept_by_sidecar
from pseudoreal_operator.observe.worker_assignment import memberships, ready_spares
from pseudoreal_operator.status import conditions

_REMEDY = (
    "decline the injection by a label or an annotation in spec.pod.template, or inject it as a native sidecar: an init"
    " container with restartPolicy Always"
)
_NAMED = 3
"""Maximum number of sidecars that a sentence names."""


def pods_to_stop(observed: Observed, now: datetime) -> tuple[str, ...]:
    """Return the names of pods that are alive, cannot save, and have more than STOP_SECONDS left: pods of doomed
    executions, and pods that a spare pod has replaced, as after a hang."""
    doomed = (
        pod
        for execution, pods in observed.pods.by_execution.items()
        if is_doomed(observed, observed.status, execution, now)
        for pod in pods.alive
    )
    return tuple(pod.name for pod in (*doomed, *observed.replaced.alive) if not is_ending_soon(pod, now))


def is_doomed(observed: Observed, status: PseudoRealJobStatus, execution: Execution, now: datetime) -> bool:
    """Return whether the ranks of an execution can neither train nor save together any more. `status`: the newest
    status."""
    # A fault with a restart number was survived: by a restart in place, or by a spare pod. Any other fault ended the
    # execution.
    if any(fault.execution == execution.number and fault.restart_in_place is None for fault in status.faults):
        return True
    # Check this before the failed pods: if a spare pod may take over, the other pods must live on to train with it.
    if can_spare_take_over(observed, execution, now):
        return False
    if _waits_for_ended_pod(observed, execution):
        return True
    ended = [*_failed_or_stuck(observed.pods.of(execution), now)]
    # A pod that does not blame a peer is the origin: no other pod has anything to add.
    if any(not has_lost_peer(pod) for pod in ended):
        return True
    # All of these pods blame a peer. The pod where the fault began reports within ORIGIN_SECONDS, or never: if that pod
    # were stopped at once, the cause would stay unknown.
    return any(now >= ended_at(pod, now) + timedelta(seconds=ORIGIN_SECONDS) for pod in ended)


def can_spare_take_over(observed: Observed, execution: Execution, now: datetime) -> bool:
    """Return whether spare pods may still replace the pods that the execution has lost: until SPARE_SECONDS are
    over, the other pods may report that they wait for a replacement."""
    ready = ready_spares(observed, execution, now)
    if not ready or execution.number < observed.status.execution:
        return False
    pods = observed.pods.of(execution)
    lost = [*pods.failed, *(pod for pod in pods.leaving if is_stuck(pod, now))]
    if not 0 < len(lost) <= min(len(ready), len(pods) - 1):
        return False
    limit = timedelta(seconds=SPARE_SECONDS)
    in_time = all(now < ended_at(pod, now) + limit for pod in lost)
    return in_time and can_another_pod_succeed(classify("", pods, observed.job.spec.restart.rules))


def _waits_for_ended_pod(observed: Observed, execution: Execution) -> bool:
    """Return whether pods of a phase with spare pods wait for a pod that has ended: a worker waits for its peer, or
    only spare pods are left. Left alone, these pods would wait for a long time."""
    pods, spares = observed.pods.of(execution), observed.spares.of(execution)
    if not spares and execution not in memberships(observed.status):
        return False
    if not pods.alive:
        return len(pods.succeeded) < max((pod.workers for pod in (*pods, *spares)), default=0)
    waits = any(one.waits_to_restart for one in observed.last_reports if one.execution == execution)
    return waits and bool(pods.failed)


def _failed_or_stuck(pods: Pods, now: datetime) -> Iterator[Pod]:
    """Yield stuck pods, and failed pods except those that stopped on request (exit code YIELDED)."""
    yield from (pod for pod in pods.failed if not has_exit_code(pod, ExitCode.YIELDED))
    yield from (pod for pod in pods.leaving if is_stuck(pod, now))


def pods_to_release(view: View) -> Iterator[str]:
    """Yield the names of pods that only sidecars keep, and whose termination messages the status has."""
    for pod in view.observed.every_pod.with_sidecars:
        # Until the status has the termination message, passes read the message from the pod, so the pod must not be
        # deleted.
        is_read = _is_over(view, pod.execution) or pod in view.observed.replaced
        if is_read and not is_ending_soon(pod, view.now):
            yield pod.name


def never_ends(view: View, job: ChildJob) -> bool:
    """Return whether a Job waits for sidecars, although the status has its outcome."""
    kept = view.observed.every_pod.of(job.execution).with_sidecars
    return bool(kept) and _is_over(view, job.execution)


def sidecar_note(view: View) -> str | None:
    """Return a sentence on a sidecar that keeps a pod of the present execution; None if there is none."""
    pod = next((pod for pod in view.pods.with_sidecars if is_kept_by_sidecar(pod, view.now)), None)
    return None if pod is None else describe_sidecar(pod)


def describe_sidecar(pod: Pod) -> str:
    names = ", ".join(pod.sidecars[:_NAMED])
    return (
        f"The trainer of pod {pod.name} has ended, but container {names} still runs, and would keep the pod and its"
        f" node for ever. The operator ends the pod. What to do: {_REMEDY}."
    )


def _is_over(view: View, execution: Execution) -> bool:
    """Return whether the stored status has the outcome of the execution."""
    if not view.status.phases:
        return False
    if conditions.has_ended(view.observed.status) or current_stage(view.status.phases) is None:
        return True
    return execution != view.execution
