"""The Progressing condition of a running execution, and events for notable changes of it. Pure."""

import hashlib
from collections.abc import Iterator

from pseudoreal_operator.failures.hang import HANG_REASONS, find_hang, straggler_sentence
from pseudoreal_operator.lifecycle.blockers import find_blocker, why_queued
from pseudoreal_operator.lifecycle.decisions import event, not_progressing, progressing
from pseudoreal_operator.lifecycle.elastic import scale_down_note, size_note
from pseudoreal_operator.lifecycle.membership import known_restarts_in_place
from pseudoreal_operator.lifecycle.stopping import can_spare_take_over, describe_sidecar
from pseudoreal_operator.observe.stages import StageKind, phases_to_finish
from pseudoreal_operator.observe.view import View
from pseudoreal_operator.observe.worker_assignment import memberships, ready_spares
from pseudoreal_operator.status.conditions import NewCondition, find
from pseudoreal_operator.status.events import Event, Reason


def change_events(view: View, condition: NewCondition) -> tuple[Event, ...]:
    """Return events for a change of the condition since the last pass. The names of the events contain no step, so each
    clock that ran out and each straggling rank gives one event per execution."""
    before = find(view.status, "Progressing")
    if before and before.reason == condition.reason:
        return ()
    if condition.reason in HANG_REASONS:
        return (event(view, Reason.HANG_DETECTED, condition.message, detail=condition.reason),)
    if condition.reason == "Straggling":
        who = hashlib.sha256(condition.message.encode()).hexdigest()[:8]
        return (event(view, Reason.STRAGGLER_DETECTED, condition.message, detail=who),)
    if condition.reason == "Finishing":
        return (event(view, Reason.FINISH_REQUESTED, condition.message),)
    return ()


def preemption_events(view: View) -> Iterator[Event]:
    """Yield the event Preempted in the first pass that observes a queue taking running pods back."""
    since = view.status.queued_since
    if since is None or view.observed.status.queued_since is not None or not view.observed.status.replicas.ready:
        return
    text = (
        f"The queue takes back the quota of execution {view.execution.number}: its pods save a checkpoint and end."
        " The job continues from this checkpoint when the queue admits it again. This does not count as a"
        " restart."
    )
    yield event(view, Reason.PREEMPTED, text, detail=since)


def progressing_condition(view: View) -> NewCondition:
    assert view.job is not None, "the rule `execution_running` passes a view with an active Job"
    if view.job.queued:
        return not_progressing("Queued", why_queued(view.job, view.spec.scheduling.queue) + scale_down_note(view))
    failed = next(iter(view.pods.failed), None)
    if failed and can_spare_take_over(view.observed, view.execution, view.now):
        return not_progressing("Ending", f"Pod {failed.name} has ended; a spare pod may replace it.")
    if failed:
        text = f"Pod {failed.name} has ended; the other pods of execution {view.execution.number} end, too."
        return not_progressing("Ending", text + _sidecar_sentence(view))
    if view.pods and not view.pods.alive and (kept := _sidecar_sentence(view)):
        return not_progressing("SidecarRunsOn", kept.strip())
    blocker = find_blocker(view)
    if blocker:
        return not_progressing(blocker.reason, blocker.message + scale_down_note(view))
    return _while_starting(view) or _while_hung(view) or _while_training(view)


def _sidecar_sentence(view: View) -> str:
    """Return a sentence on a container that keeps running in a pod whose trainer has ended; empty if there is none."""
    pod = next(iter(view.pods.with_sidecars), None)
    return f" {describe_sidecar(pod)}" if pod else ""


def _while_starting(view: View) -> NewCondition | None:
    ready = view.pods.ready
    # Pods that have completed are not ready any more.
    if view.pods and (ready >= view.workers or not view.pods.alive):
        return None
    text = f"{ready} of {view.workers} pods run; if this lasts: kubectl describe job {view.job_name}"
    if not view.pods:
        text = (
            f"Job {view.job_name} has no pods yet. If this lasts, the API server refuses them, for instance because"
            f" of a Pod Security level, a quota or a policy: kubectl describe job {view.job_name} says why."
        )
    return progressing("Starting", text)


def _while_hung(view: View) -> NewCondition | None:
    """Return the condition for a hung training stage; None if the stage is not hung. Here spec.hang.action is Report:
    with another action, the rule `stage_hung` has decided already."""
    hang = find_hang(view) if view.stage.kind is StageKind.TRAIN else None
    if hang is None:
        return None
    return not_progressing(hang.reason, f"{hang.sentence} spec.hang.action is Report. What to do: {view.logs_command}")


def _restart_note(view: View) -> str:
    places, said = memberships(view.status).get(view.execution), known_restarts_in_place(view)
    took = f" {view.status.spares.message}" if places and view.status.spares else ""
    if said is None:
        return took
    # A takeover uses a restart number as well, so after a takeover the number does not count restarts in place.
    times = f" {said.restarts} time{'s' * (said.restarts > 1)}" if places is None else ""
    return f"{took} Its ranks were restarted in place{times}, the last time for this reason: {said.message}"


def _spares_note(view: View) -> str:
    wanted = view.spec.phases[view.stage.index].spares
    if wanted == 0:
        return ""
    ready = len(ready_spares(view.observed, view.execution, view.now))
    return f" {ready} of {wanted} spare pods wait{'s' * (ready == 1)} to replace a worker."


def _is_to_finish(view: View) -> bool:
    return view.stage.phase in phases_to_finish(view.spec, view.status)


def _silence_sentence(view: View) -> str | None:
    """Return the second part of a sentence on an execution whose pods do not report; None if no pod ever reported and
    no feature needs reports."""
    has_reported, needs = view.observed.has_reported, list(_needs_reports(view))
    if not has_reported and not needs:
        return None
    since = f"since {view.observed.silent_since:%Y-%m-%d %H:%M:%S} UTC" if has_reported else "so far"
    others = "; most jobs are silent, so the cause is probably the network" if view.observed.path_is_cut else ""
    lacks = f" Without reports, {'; '.join(needs)}." if needs else ""
    remedy = (
        "check that no NetworkPolicy keeps the pods from the operator's Service, and that they trust its certificate"
    )
    if view.spec.network.host_network:
        remedy = "name the addresses of the nodes in networkPolicy.from of the operator's chart"
    return (
        f"probably trains, but no report of its pods has arrived {since}{others}. This counts neither as a fault nor"
        f" as a hang.{lacks} What to do: {remedy}."
    )


def _needs_reports(view: View) -> Iterator[str]:
    phase = view.spec.phases[view.stage.index]
    if _is_to_finish(view):
        yield "the request to end the phase does not reach the pods"
    if phase.spares:
        yield "no spare pod can replace a worker"
    if view.workers > 1 and view.spec.restart.in_place:
        yield "a pod that does not notice a restart in place is not told of it, and all pods are created again"


def _while_training(view: View) -> NewCondition:
    where = f"Execution {view.execution.number} at {view.stage.title}"
    if view.stage.kind is StageKind.DELINK:
        return progressing("Delinking", f"{where} is delinking.")
    if view.observed.silent_since is not None and (sentence := _silence_sentence(view)):
        return progressing("Unheard", f"{where} {sentence}")
    if view.reporting and not any(last_report.training_since for last_report in view.reporting):
        return progressing("Starting", f"{where} is starting: its pods run, and no rank trains yet.")
    if _is_to_finish(view) and any(last_report.told_to_finish for last_report in view.reporting):
        return progressing("Finishing", f"{where} was asked to end now, with a checkpoint.")
    before = find(view.status, "Progressing")
    straggler = straggler_sentence(view, known=before is not None and before.reason == "Straggling")
    note = size_note(view) + _spares_note(view) + _restart_note(view) + ("" if straggler is None else f" {straggler}.")
    note += " Its pods are told to end now when they report next." if _is_to_finish(view) else ""
    return progressing("Straggling" if straggler else "Training", f"{where} is training.{note}")
