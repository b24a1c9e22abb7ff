"""Clocks of membership: how long the pods of an execution are waited for, and which pods have run out of time. Pure.

From the end of a pod, in this order: the pod in which a fault began reports it (ORIGIN_SECONDS); the other pods, which
report every REPORT_SECONDS, say that they wait for a replacement (SPARE_SECONDS); the pods themselves give the wait up
(`SPARE_RESTART_SECONDS` of the trainer). Each time includes the ones before it, so the operator decides while the pods
still wait. A pod that is asked to end has its grace period, or STOP_SECONDS if it cannot save. If the pod still exists
STUCK_SECONDS later, it counts as stuck, and a spare pod may replace it.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

from pseudoreal_operator import clock
from pseudoreal_operator.observe.view import SIDECAR_SECONDS, JobState, Observed, Pod, PodPhase, ended_at

STOP_SECONDS = 5
"""Grace period in seconds of pods that cannot save: enough to write their termination messages."""
ORIGIN_SECONDS = 6.0
"""Time limit in seconds for the pod in which a fault began to report the fault, counted from the end of a pod that only
lost its connection to a peer."""
STUCK_SECONDS = 15.0
"""Seconds after the end of a pod's grace period at which the pod counts as stuck if it still exists."""
JOIN_SECONDS = 60.0
"""Time limit in seconds for a pod that was told of a membership to begin it. Shorter than the time after which the
other pods give up their wait for it: otherwise they would count as lost, and not the pod that they wait for."""
SPARE_SECONDS = 20.0
"""Time limit in seconds, from the end of a pod, for the other pods to report that they wait for a replacement. Pods
report every few seconds."""
GROWTH = 10
"""Minimum time with fewer workers before all workers are tried again, as a multiple of patienceSeconds. A failed
attempt may cost patienceSeconds of training, so failed attempts cost at most a tenth of the time."""


def is_stuck(pod: Pod, now: datetime) -> bool:
    """Return whether the pod cannot be ended, for instance on a node that is off."""
    if pod.deletion_deadline is None or not pod.is_alive:
        return False
    return now >= clock.from_text(pod.deletion_deadline) + timedelta(seconds=STUCK_SECONDS)


def is_ending_soon(pod: Pod, now: datetime) -> bool:
    return pod.deletion_deadline is not None and clock.from_text(pod.deletion_deadline) <= now + timedelta(
        seconds=STOP_SECONDS
    )


def pod_moments(observed: Observed, now: datetime) -> Iterator[datetime]:
    """Yield future moments at which the passage of time alone may change which pods are to be stopped, or which
    count as stuck."""
    active = {job.execution for job in observed.jobs if job.state is JobState.ACTIVE}
    by_execution = observed.every_pod.by_execution.items()
    for pod in (pod for execution, pods in by_execution if pods.alive or execution in active for pod in pods.timed):
        if pod.is_alive and pod.deletion_deadline:
            waits = [(clock.from_text(pod.deletion_deadline), STUCK_SECONDS)]
        else:
            limits = [SIDECAR_SECONDS] if pod.sidecars else []
            if pod.phase is PodPhase.FAILED:
                limits += [ORIGIN_SECONDS, SPARE_SECONDS] if observed.spares else [ORIGIN_SECONDS]
            waits = [(ended_at(pod, now), seconds) for seconds in limits]
        yield from (moment for since, limit in waits if (moment := since + timedelta(seconds=limit)) > now)
