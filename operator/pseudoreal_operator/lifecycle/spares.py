"""A spare pod replaces a lost worker: the other workers keep their pods and restart their ranks in place. Pure.

Two pods must never train as the same worker. So a takeover is written to the status first, and only a stored takeover
is sent to pods, in the answers to their reports (`ReportStore.follow`): an operator that dies cannot have sent two
different takeovers. Until the remaining pods learn of the takeover, they cannot start without the lost worker. A lost
pod that still runs is not a member of the next rendezvous, and loses the checkpoint fence to the members.

If no takeover succeeds, the pods end, and the job restarts as it would without spare pods.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pseudoreal_api.status.status import PseudoRealJobStatus, Spares, TakenPlace
from pseudoreal_api.wire.messages import MOST_RESTART

from pseudoreal_operator.changes import status_with
from pseudoreal_operator.failures import results
from pseudoreal_operator.failures.classify import (
    MissingPods,
    Verdict,
    allowed_restarts_in_place,
    can_another_pod_succeed,
    classify,
)
from pseudoreal_operator.lifecycle.decisions import (
    Cause,
    Decision,
    avoided_node_events,
    event,
    progressing,
    unposted_start_events,
    why_exhausted,
    with_failure,
    with_retry,
)
from pseudoreal_operator.lifecycle.in_place import counted_restarts, own_restarts
from pseudoreal_operator.lifecycle.stopping import is_stuck
from pseudoreal_operator.observe.stages import StageKind, with_stage_started
from pseudoreal_operator.observe.view import JobState, LastReport, Pod, PodPhase, View
from pseudoreal_operator.observe.worker_assignment import memberships, ready_spares
from pseudoreal_operator.status.events import Reason


@dataclass(frozen=True)
class _LostWorkers:
    """Numbers of the workers whose pods are missing, failed or stuck."""

    workers: tuple[int, ...]
    stuck: Pod | None
    """A stuck pod among the lost pods, for instance on a node that is off; None: no pod is stuck."""


def spare_took_over(view: View) -> Decision | None:
    """Let spare pods replace lost workers, when other workers wait for the lost ones and enough spare pods are
    ready."""
    if view.stage.kind is not StageKind.TRAIN or view.job is None or view.job.state is not JobState.ACTIVE:
        return None
    if view.job.queued or not view.job.outlives_pods:
        return None
    lost, ready = _find_lost_workers(view), ready_spares(view.observed, view.execution, view.now)
    if not 0 < len(lost.workers) <= min(len(ready), view.workers - 1):
        return None
    # A worker that lost its connection reports that it waits; without such a report the workers may train on. A
    # connection to a stuck pod may last long, so there may be no report.
    if lost.stuck is None and not any(last_report.waits_to_restart for last_report in view.reporting):
        return None
    missing = MissingPods(stuck=lost.stuck, workers=view.missing_workers)
    verdict = classify(view.job_name, view.pods, view.spec.restart.rules, missing)
    counts = verdict.action == "Restart"
    if not can_another_pod_succeed(verdict) or why_exhausted(view.status, view.spec.restart, view.now, counts=counts):
        return None
    restart = _next_restart(view)
    return _take_over(view, lost, ready, verdict, restart) if restart <= MOST_RESTART else None


def _find_lost_workers(view: View) -> _LostWorkers:
    failed = [pod.index for pod in view.pods if pod.phase is PodPhase.FAILED]
    stuck = [pod for pod in view.pods if is_stuck(pod, view.now)]
    workers = sorted({*view.missing_workers, *failed, *(pod.index for pod in stuck)})
    return _LostWorkers(tuple(workers), next(iter(stuck), None))


def _next_restart(view: View) -> int:
    """Return a restart number that no pod can have reached: pods that have restarted under the same number without the
    spare pod would not notice the takeover. Pods that wait for a restart cannot begin it without the lost pod; pods
    that train may already wait for the next restart without having reported it."""
    before = memberships(view.status).get(view.execution)
    reached = [counted_restarts(view), before.restart if before else 0, *map(_restart_reached, view.last_reports)]
    return 1 + max(reached)


def _restart_reached(last_report: LastReport) -> int:
    known = last_report.report.in_place.restarts if last_report.report.in_place else 0
    return known if last_report.waits_to_restart else known + 1


def _take_over(view: View, lost: _LostWorkers, ready: Sequence[Pod], verdict: Verdict, restart: int) -> Decision:
    # worker index -> spare pod
    counts, takeovers = verdict.action == "Restart", dict(zip(lost.workers, ready, strict=False))
    cause = Cause(verdict.reason, _sentence(view, lost, verdict), verdict.pod, counts)
    status = results.with_reports(with_stage_started(view.status, view.stage), view.last_reports, view.now)
    status = results.with_checkpoints(status, view.pods_with_deleted)
    status = with_retry(with_failure(view, status, cause, restart_in_place=restart), counts=counts)
    clauses = [f"spare pod {pod.name} replaces worker {worker}" for worker, pod in takeovers.items()]
    text = f"{cause.sentence} {'; '.join(clauses).capitalize()}"
    status = status_with(status, spares=_spares_status(view, status, takeovers, restart, f"{text}."))
    place = f"checkpoint {status.checkpoint.latest} or a newer one" if status.checkpoint else "the newest checkpoint"
    announcement = f"{text}; all ranks start again in the remaining pods, from {place}."
    return Decision(
        status,
        "Training",
        progressing("SpareTookOver", announcement),
        events=(
            *unposted_start_events(view),
            event(view, Reason.SPARE_TOOK_OVER, announcement, detail=str(restart)),
            *avoided_node_events(view, status),
        ),
        children=view.stage,
    )


def _sentence(view: View, lost: _LostWorkers, verdict: Verdict) -> str:
    if verdict.pod is not None:
        return verdict.sentence
    if lost.stuck is not None:
        return f"Pod {lost.stuck.name} on node {lost.stuck.node or '(none)'} cannot be ended: its node may be lost."
    numbers = ", ".join(map(str, lost.workers))
    return f"The pod of worker {numbers} of {view.job_name} disappeared without a message, as a deleted pod does."


def _spares_status(
    view: View, status: PseudoRealJobStatus, takeovers: dict[int, Pod], restart: int, message: str
) -> Spares:
    before = memberships(view.status).get(view.execution)
    # The whole assignment, with earlier takeovers: the status keeps one record per execution.
    pods = {one.worker: one.pod for one in before.takeovers} if before else {}
    pods |= {worker: pod.index for worker, pod in takeovers.items()}
    allowed = allowed_restarts_in_place(view.spec.restart, status)
    return Spares(
        phase_name=view.execution.phase,
        execution=view.execution.number,
        restart=restart,
        own_restarts=max(0, min(allowed, view.spec.restart.in_place - own_restarts(view))),
        places=[TakenPlace(worker=worker, pod=pod) for worker, pod in sorted(pods.items())],
        message=message[:1024],
    )
