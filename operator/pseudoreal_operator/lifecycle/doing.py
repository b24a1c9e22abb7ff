"""The Progressing condition of a running execution, and events for notable changes of it. Pure."""

import hashlib
from collections.abc import Iterator

from pseudoreal_operator.failures.hang import STALLS, find_stall, straggler_sentence
from pseudoreal_operator.failures.obstacles import why_queued
from pseudoreal_operator.lifecycle import sidecars
from pseudoreal_operator.lifecycle.decisions import event, progresses, stands
from pseudoreal_operator.lifecycle.elastic import prospect, size_note
from pseudoreal_operator.lifecycle.in_place import of_this_execution
from pseudoreal_operator.lifecycle.stopping import may_be_replaced
from pseudoreal_operator.lifecycle.waiting import obstacle_of
from pseudoreal_operator.observe.asked import phases_to_finish
from pseudoreal_operator.observe.stages import StageKind
from pseudoreal_operator.observe.view import PodPhase, View
from pseudoreal_operator.observe.worker_assignment import memberships, ready_spares
from pseudoreal_operator.status.conditions import NewCondition, find
from pseudoreal_operator.status.events import Event, Reason


def noticed(view: View, doing: NewCondition) -> tuple[Event, ...]:
    """Return events for a change of the condition since the last pass. Their names contain no step, so each clock
    that ran out and each rank that straggled gives one event per execution, however often it is noticed."""
    before = find(view.status, "Progressing")
    if before and before.reason == doing.reason:
        return ()
    if doing.reason in STALLS:
        return (event(view, Reason.HANG_DETECTED, doing.message, detail=doing.reason),)
    if doing.reason == "Straggling":
        who = hashlib.sha256(doing.message.encode()).hexdigest()[:8]
        return (event(view, Reason.STRAGGLER_DETECTED, doing.message, detail=who),)
    if doing.reason == "Finishing":
        return (event(view, Reason.FINISH_REQUESTED, doing.message),)
    return ()


def taken_back(view: View) -> Iterator[Event]:
    """Yield the event that a queue takes running pods back, the first time that a pass sees it."""
    since = view.status.queued_since
    if since is None or view.observed.status.queued_since is not None or not view.observed.status.replicas.ready:
        return
    text = (
        f"The queue takes the pods of execution {view.execution.number} back: they save and end. It goes on from there"
        " when the queue admits it again; no restart is counted."
    )
    yield event(view, Reason.PREEMPTED, text, detail=since)


def activity(view: View) -> NewCondition:
    assert view.job is not None, "the rule `running` passes a view with an active Job"
    if view.job.queued:
        return stands("Queued", why_queued(view.job, view.spec.scheduling.queue) + prospect(view))
    failed = next((pod for pod in view.pods if pod.phase is PodPhase.FAILED), None)
    if failed and may_be_replaced(view.observed, view.execution, view.now):
        return stands("Ending", f"Pod {failed.name} has ended; a spare pod may take its place.")
    if failed:
        return stands(
            "Ending",
            f"Pod {failed.name} has ended, and so do the others of execution {view.execution.number}.{_kept(view)}",
        )
    if view.pods and not any(pod.is_alive for pod in view.pods) and (kept := _kept(view)):
        return stands("SidecarRunsOn", kept.strip())
    obstacle = obstacle_of(view)
    if obstacle:
        return stands(obstacle.reason, obstacle.message + prospect(view))
    return _incomplete(view) or _stalled(view) or _at_work(view)


def _kept(view: View) -> str:
    """Return a sentence on a container that keeps running in a pod whose trainer has ended; empty if there is none."""
    pod = next((pod for pod in view.pods if pod.runs_on), None)
    return f" {sidecars.describe(pod)}" if pod else ""


def _incomplete(view: View) -> NewCondition | None:
    ready = sum(pod.ready for pod in view.pods)
    # Pods that have completed are not ready any more.
    if view.pods and (ready >= view.workers or not any(pod.is_alive for pod in view.pods)):
        return None
    text = f"{ready} of {view.workers} pods run; if this lasts: kubectl describe job {view.job_name}"
    if not view.pods:
        text = (
            f"Job {view.job_name} has no pods yet. If this lasts, the API server refuses them, as by a Pod Security"
            f" level, a quota or a policy: kubectl describe job {view.job_name} says why."
        )
    return progresses("Starting", text)


def _stalled(view: View) -> NewCondition | None:
    """Return the condition for a clock that ran out, if spec.hang.action is Report; with other actions a rule has
    acted already."""
    stall = find_stall(view) if view.stage.kind is StageKind.TRAIN else None
    if stall is None:
        return None
    return stands(stall.reason, f"{stall.sentence} spec.hang.action is Report. What to do: {view.logs_command}")


def _restarts(view: View) -> str:
    places, said = memberships(view.status).get(view.execution), of_this_execution(view)
    took = f" {view.status.spares.message}" if places and view.status.spares else ""
    if said is None:
        return took
    # A takeover uses a restart number as well, so after one the number is no count of restarts in place.
    times = f" {said.restarts} time{'s' * (said.restarts > 1)}" if places is None else ""
    return f"{took} Its ranks were restarted in place{times}, the last time as: {said.message}"


def _spare_pods(view: View) -> str:
    wanted = view.spec.phases[view.stage.index].spares
    if wanted == 0:
        return ""
    ready = len(ready_spares(view.observed, view.execution, view.now))
    return f" {ready} of {wanted} spare pods wait{'s' * (ready == 1)} to take a place."


def _is_to_finish(view: View) -> bool:
    return view.stage.phase in phases_to_finish(view.spec, view.status)


def _unheard(view: View) -> str | None:
    """Return the second part of a sentence on an execution whose pods do not report; None if none ever did and no
    feature needs their reports."""
    has_reported, needs = view.observed.has_reported, list(_needs_reports(view))
    if not has_reported and not needs:
        return None
    since = f"since {view.observed.silent_since:%Y-%m-%d %H:%M:%S} UTC" if has_reported else "so far"
    others = "; most jobs are silent, so it is the path" if view.observed.path_is_cut else ""
    lacks = f" Until they are, {'; '.join(needs)}." if needs else ""
    remedy = "see that no NetworkPolicy keeps them from the operator's Service, and that they trust its certificate"
    if view.spec.network.host_network:
        remedy = "name the addresses of the nodes in networkPolicy.from of the operator's chart"
    return (
        f"trains, as far as is known: none of its pods was heard {since}{others}. That is no fault, and no hang is"
        f" judged by it.{lacks} What to do: {remedy}."
    )


def _needs_reports(view: View) -> Iterator[str]:
    phase = view.spec.phases[view.stage.index]
    if _is_to_finish(view):
        yield "the request that the phase end now does not reach them"
    if phase.spares:
        yield "no spare pod can take a place"
    if view.workers > 1 and view.spec.restart.in_place:
        yield "a pod that notices nothing of a restart in place hears of none, and new pods follow"


def _at_work(view: View) -> NewCondition:
    where = f"Execution {view.execution.number} at {view.stage.title}"
    if view.stage.kind is StageKind.DELINK:
        return progresses("Delinking", f"{where} is delinking.")
    if view.observed.silent_since is not None and (sentence := _unheard(view)):
        return progresses("Unheard", f"{where} {sentence}")
    if view.reporting and not any(last_report.begun for last_report in view.reporting):
        return progresses("Starting", f"{where} is starting: its pods run, and no rank trains yet.")
    if _is_to_finish(view) and any(last_report.told_to_finish for last_report in view.reporting):
        return progresses("Finishing", f"{where} is asked to end now, through a checkpoint.")
    before = find(view.status, "Progressing")
    straggler = straggler_sentence(view, known=before is not None and before.reason == "Straggling")
    note = size_note(view) + _spare_pods(view) + _restarts(view) + ("" if straggler is None else f" {straggler}.")
    note += " Its pods are told to end now as they report next." if _is_to_finish(view) else ""
    return progresses("Straggling" if straggler else "Training", f"{where} is training.{note}")
