"""Deadlines: rules that end a job or an execution after a time limit, and the clocks that the rules compare with the
limits. Pure.

Clocks stand still while a job is suspended, or while a queue holds its pods.
"""

from datetime import datetime, timedelta

from pseudoreal_api.status.status import Transition

from pseudoreal_operator import clock
from pseudoreal_operator.lifecycle.blockers import find_blocker
from pseudoreal_operator.lifecycle.decisions import Announcement, Decision, announce, fail
from pseudoreal_operator.lifecycle.retraining import roll_back
from pseudoreal_operator.manifests.exclusion import EXCLUDED_SECONDS
from pseudoreal_operator.observe.stages import StageKind
from pseudoreal_operator.observe.view import JobState, LastReport, View
from pseudoreal_operator.observe.worker_assignment import memberships
from pseudoreal_operator.status import conditions
from pseudoreal_operator.status.events import Reason


def deadline_exceeded(view: View) -> Decision | None:
    allowed = view.spec.deadlines.active_seconds
    if allowed is None or _is_paused(view) or view.now < active_deadline(view, allowed):
        return None
    text = (
        f"The job did not end within {allowed} s of its start or last resume (spec.deadlines.activeSeconds). It was"
        f" in {view.stage.title}."
    )
    return fail(view, view.status, "DeadlineExceeded", text)


def delink_timed_out(view: View) -> Decision | None:
    transition = view.status.transition
    if view.stage.kind is not StageKind.DELINK or transition is None or _is_paused(view):
        return None
    if view.now < clock.from_text(transition.deadline):
        return None
    blocker = find_blocker(view) if view.job else None
    why = blocker.message if blocker else f"What to do: {view.logs_command}"
    sentence = (
        f"{view.stage.title.capitalize()} did not end within {view.spec.delink.timeout_seconds} s of the end of"
        f" phase {transition.from_phase} (spec.delink.timeoutSeconds). {why}"
    )
    if view.spec.delink.on_timeout == "RollBack":
        return roll_back(view, sentence)
    return fail(view, view.status, "DelinkTimeout", sentence)


def readmit_nodes(view: View) -> Decision | None:
    """Start a new execution without excluded nodes when pods have waited long enough for other nodes: perhaps only the
    nodes that rejected pods of the job are suitable."""
    moment = exclusion_ends(view)
    if moment is None or view.now < moment:
        return None
    number = view.status.execution + 1
    text = (
        f"{view.placed_pods} of {view.workers} pods had a node by {clock.to_text(moment)} without the nodes that"
        f" rejected pods of this job. Execution {number} at {view.stage.title} may use these nodes again"
    )
    return announce(view, view.status, Announcement("NodesReadmitted", text, (Reason.NODES_READMITTED,)), wait=0)


def exclusion_ends(view: View) -> datetime | None:
    """Return the time at which the pods have waited long enough for nodes other than the excluded ones; None if no
    nodes are excluded, or no pod waits for a node."""
    job = view.job
    if job is None or job.state is not JobState.ACTIVE or job.queued or job.excludes_until is None:
        return None
    if not view.unplaced_pods:
        return None
    # A queue may have held the Job past the end of the exclusion; the pods then still get EXCLUDED_SECONDS.
    return max(clock.from_text(job.excludes_until), startup_deadline(view, EXCLUDED_SECONDS))


def late_start_sentence(view: View) -> str | None:
    """Return a sentence if not all pods run in time; else None. Call it with an active Job that no queue holds."""
    allowed = view.spec.deadlines.startup_seconds
    if view.status.execution_time is None or have_all_started(view) or view.now < startup_deadline(view, allowed):
        return None
    blocker = find_blocker(view)
    why = blocker.message if blocker else f"What to do: kubectl describe job {view.job_name}"
    return (
        f"{view.started_pods} of {view.workers} pods ran {allowed} s after their creation"
        f" (spec.deadlines.startupSeconds). {why}"
    )


def have_all_started(view: View) -> bool:
    """Return whether all workers have run since the pods were requested.

    A report proves that all workers have met if it shows training, ended ranks, or ranks lost before a restart in
    place. A pod missing afterwards was lost: the rules about missing workers decide. Earlier reports do not count: they
    came from pods taken back by a queue.
    """
    if view.started_pods >= view.workers:
        return True
    requested, membership = startup_deadline(view, 0), memberships(view.status).get(view.execution)
    begun = membership.restart if membership else 0
    return any(
        last_report.first >= requested and (last_report.training_since is not None or _had_ranks(last_report, begun))
        for last_report in view.last_reports
    )


def _had_ranks(last_report: LastReport, begun: int) -> bool:
    """Return whether the pod is known to have had ranks before its newest restart in place. `begun`: restart at the
    start of the present membership. A pod that has only followed this restart may have had no ranks: a spare pod, or a
    pod admitted by a queue after the takeover."""
    in_place = last_report.report.in_place
    return in_place is not None and (in_place.peer_lost or in_place.restarts > begun)


def creation_timed_out(view: View) -> Decision | None:
    """Fail the job when the API server has rejected its children for too long."""
    deadline = blocked_deadline(view)
    if deadline is None or view.now < deadline:
        return None
    said = conditions.find(view.status, "Progressing")
    text = (
        f"The pods could not be created within {view.spec.deadlines.startup_seconds} s"
        f" (spec.deadlines.startupSeconds). {said.message if said else ''}"
    )
    return fail(view, view.status, "StartupDeadlineExceeded", text.rstrip())


def active_deadline(view: View, allowed: int) -> datetime:
    since = view.status.active_since or view.status.start_time or clock.to_text(view.now)
    return clock.from_text(since) + timedelta(seconds=allowed)


def startup_deadline(view: View, allowed: int) -> datetime:
    begun = [view.status.execution_time or clock.to_text(view.now)]
    begun += [view.job.start_time] if view.job and view.job.start_time else []
    return max(map(clock.from_text, begun)) + timedelta(seconds=allowed)


def blocked_deadline(view: View) -> datetime | None:
    """Return the time after which rejected children fail the job; None: never. The limit applies only with
    onStartupTimeout: Fail. Otherwise the job waits, because a restart would not help: pods that were never created hold
    no resources, and the requests become rarer anyway."""
    allowed, since = view.spec.deadlines.startup_seconds, view.status.blocked_since
    return clock.from_text(since) + timedelta(seconds=allowed) if since and fails_at_timeout(view) else None


def fails_at_timeout(view: View) -> bool:
    return view.spec.deadlines.on_startup_timeout == "Fail"


def _is_paused(view: View) -> bool:
    """Return whether clocks stand still: from the request to suspend until the job is resumed, and while a queue holds
    the job's pods."""
    return view.spec.suspend or conditions.is_true(view.status, "Suspended") or view.status.queued_since is not None


def renewed_transition(view: View) -> Transition | None:
    """Return the transition with its deadline counted from now, because its clock stands still while the job is
    suspended; None if there is no transition."""
    if view.status.transition is None:
        return None
    later = view.now + timedelta(seconds=view.spec.delink.timeout_seconds)
    return view.status.transition.model_copy(update={"deadline": clock.to_text(later)})
