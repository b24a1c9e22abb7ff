"""plan(what was seen, now) -> what to make, delete, say and remember. Pure.

A plan carries out one decision. Nothing is remembered but the status, and the number of a new execution is written to
it before any child of that execution is made; so a pass may die anywhere, and the next one finds its way.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from pseudoreal_api.spec.job import JobMetadata
from pseudoreal_api.status.status import PhaseStatus, PseudoRealJobStatus, Replicas

from pseudoreal_operator import clock
from pseudoreal_operator.changes import phase_with, status_with
from pseudoreal_operator.failures.hang import seconds_to_stall
from pseudoreal_operator.lifecycle.acceptance import problem_of
from pseudoreal_operator.lifecycle.deadlines import active_deadline, blocked_deadline, exclusion_ends, startup_deadline
from pseudoreal_operator.lifecycle.decisions import Decision, refuse, stands, unforeseen
from pseudoreal_operator.lifecycle.elastic import moments_of
from pseudoreal_operator.lifecycle.in_place import counted
from pseudoreal_operator.lifecycle.placement import placement
from pseudoreal_operator.lifecycle.rules import RULES, start
from pseudoreal_operator.lifecycle.sidecars import never_ends, pods_to_release
from pseudoreal_operator.lifecycle.stopping import is_lost, moments, pods_to_stop
from pseudoreal_operator.manifests.objects import children, claim, identity
from pseudoreal_operator.observe.asked import with_served
from pseudoreal_operator.observe.stages import Execution, Phases, StageKind, all_stages, current_stage, has_begun
from pseudoreal_operator.observe.view import JobState, Observed, PodPhase, View
from pseudoreal_operator.settings import Settings
from pseudoreal_operator.status import conditions
from pseudoreal_operator.status.conditions import NewCondition, refused
from pseudoreal_operator.status.events import Event

BLOCKED_SECONDS, MOST_BLOCKED_SECONDS = 5.0, 300.0
"""Seconds between two tries to make what the API server refuses: at first, and at most."""
PROGRESS_SECONDS = 10.0
"""Seconds between two writes of the status for progress alone."""
_MOMENT_SECONDS = 0.1
KEPT_JOBS = {JobState.COMPLETE: 5, JobState.FAILED: 5}
"""Number of Jobs of a running job that are kept once they have ended, for their pods' logs, by how they ended."""


@dataclass(frozen=True)
class Plan:
    """Effects of one pass, to be carried out in this order: stop pods, give up Jobs and delete Jobs (all by name),
    apply manifests, write the status, post events."""

    status: PseudoRealJobStatus
    trial: tuple[dict[str, Any], ...] = ()
    """Manifests to be tried before all else, without being made: the children of all stages, when the job is first
    seen, resumed or prolonged. What the API server finds invalid is known before weeks of training, not after them."""
    expire: bool = False
    """Whether the job itself is to be deleted, and nothing else is to be done."""
    stop: tuple[str, ...] = ()
    give_up: tuple[str, ...] = ()
    """Jobs that are to fail now, with their pods, and stay."""
    delete: tuple[str, ...] = ()
    apply: tuple[dict[str, Any], ...] = ()
    events: tuple[Event, ...] = ()
    wake_after: float | None = None


def plan(seen: Observed, now: datetime, settings: Settings) -> Plan:
    view = View(seen, now)
    if conditions.has_ended(seen.status):
        return _afterwards(view)
    counting, told = counted(view)
    view = View(counting, now)
    decision = next((decision for rule in RULES if (decision := rule(view))), None) or start(view)
    decision = replace(decision, events=(*told, *decision.events))
    return (_tried if decision.tries_children else _planned)(view, decision, settings)


def _tried(view: View, decision: Decision, settings: Settings) -> Plan:
    try:
        stages = all_stages(view.spec)
        trial = [manifest for stage in stages for manifest in children(view.seen.job, stage, decision.status, settings)]
    except Exception as error:  # a template may hold anything, and what it breaks must be said, not raised
        return _planned(view, refuse(view.status, unforeseen(error), view.now), settings)
    return replace(_planned(view, decision, settings), trial=tuple(trial))


def _afterwards(view: View) -> Plan:
    """The plan for a job that has ended: nothing of it runs, and what its owner does not want to keep goes."""
    seen, ttl = view.seen, view.spec.deadlines.ttl_seconds_after_finished
    waits = [(moment - view.now).total_seconds() for moment in moments(seen, view.now)]
    if ttl is not None and seen.status.completion_time:
        left = (clock.from_text(seen.status.completion_time) + timedelta(seconds=ttl) - view.now).total_seconds()
        if left <= 0:
            return Plan(seen.status, expire=True)
        waits.append(left)
    # Tools that follow generations (kstatus: Flux, kpt, Helm) take an older one for work in progress.
    status = status_with(seen.status, observed_generation=view.metadata.generation)
    kept = view.spec.clean_up.children == "Keep"
    jobs = tuple(_jobs_in_the_way(view) if kept else (job.name for job in seen.jobs if not job.deleting))
    return Plan(status, stop=_pods_to_end(view), delete=jobs, wake_after=min(waits, default=None))


def plan_refusal(seen: Observed, sentence: str, now: datetime) -> Plan:
    """The plan for a job whose children the API server finds invalid. Where it found them valid before, something new
    refuses them, such as a policy or another release of Kubernetes, and what was trained is not given up for that."""
    view = View(seen, now)
    if conditions.has_ended(view.status) or has_begun(view.status):
        return plan_blocked(seen, sentence, now)
    return _planned(view, refuse(view.status, sentence, now), settings=None)


def plan_unreadable(metadata: JobMetadata, status: PseudoRealJobStatus, sentence: str, now: datetime) -> Plan:
    """The plan for a job that the API server stored and that this release cannot read, for instance while another
    release takes over."""
    return _standing(metadata, status, stands("Unreadable", sentence), now)


def plan_blocked(seen: Observed, sentence: str, now: datetime) -> Plan:
    """The plan for a job whose children the API server refuses for now, by a quota or a policy, or because it fails
    itself."""
    return _blocked(seen, stands("Blocked", sentence), now)


def plan_conflict(seen: Observed, sentence: str, now: datetime) -> Plan:
    """The plan for a job one of whose children cannot be made, because an object that is not the job's has its name."""
    return _blocked(seen, stands("NameConflict", sentence), now)


def _blocked(seen: Observed, why: NewCondition, now: datetime) -> Plan:
    """The plan for a job that waits until the API server takes its children. Each wait is as long as all that were
    before, so that jobs behind a quota ask little."""
    standing, ended = _standing(seen.job.metadata, seen.status, why, now), conditions.has_ended(seen.status)
    since = (seen.status.completion_time if ended else seen.status.blocked_since) or clock.to_text(now)
    status = standing.status if ended else status_with(standing.status, blocked_since=since)
    waits = [max(BLOCKED_SECONDS, (now - clock.from_text(since)).total_seconds()), MOST_BLOCKED_SECONDS]
    deadline = blocked_deadline(View(replace(seen, status=status), now))
    if deadline is not None and deadline > now:
        waits.append((deadline - now).total_seconds())
    return replace(standing, status=status, wake_after=min(waits))


def _standing(metadata: JobMetadata, status: PseudoRealJobStatus, why: NewCondition, now: datetime) -> Plan:
    """The plan where nothing is decided: all that was said stays, but for why the job does not go on."""
    status = status_with(status, observed_generation=metadata.generation)
    if conditions.has_ended(status):
        return Plan(status)
    said = conditions.with_condition(status.conditions, why, metadata.generation, now)
    return Plan(status_with(status, conditions=said))


def _planned(view: View, decision: Decision, settings: Settings | None) -> Plan:
    status = _described(view, decision)
    status = status_with(status, replicas=_replicas(view, decision), placement=placement(view))
    status, unhurried_by = _unhurried(view.seen.status, status, view.now)
    execution = decision.children.execution(decision.status.execution) if decision.children else None
    made = _made(view, decision, settings) if settings else []
    # Why a Job goes must be in the status before the Job goes: the number of a new execution, or the job's end. After
    # an operator that died between the two, the next pass would take the Job for one that somebody else deleted.
    announced = status.execution > view.seen.status.execution > 0 or decision.ended is not None
    return Plan(
        status,
        stop=_pods_to_end(view),
        give_up=_lost_jobs(view, execution),
        delete=() if announced else (*_jobs_in_the_way(view, execution), *_old_jobs(view)),
        apply=tuple(made),
        events=decision.events,
        wake_after=min([*_waits(view, decision), *unhurried_by], default=None),
    )


def _made(view: View, decision: Decision, settings: Settings) -> list[dict[str, Any]]:
    if decision.children is None:
        return []
    volume, execution = claim(view.seen.job), decision.children.execution(decision.status.execution)
    made = [volume] if volume and identity(volume) not in view.seen.existing else []
    if any(child.execution == execution for child in view.seen.jobs):
        # It is made last, so the others are there.
        return made
    return [*made, *children(view.seen.job, decision.children, decision.status, settings)]


def _described(view: View, decision: Decision) -> PseudoRealJobStatus:
    """The status that is written: what was decided, and what follows from it."""
    old, generation, now = view.seen.status, view.metadata.generation, view.now
    problem = None if decision.ended else problem_of(view.spec)
    accepted = refused(problem) if problem else decision.accepted
    wanted = [accepted, decision.progressing, conditions.delinked(decision.status.phases), decision.suspended]
    wanted += [decision.ended] if decision.ended else []
    return status_with(
        with_served(view.spec, decision.status),
        phases=_timed(decision.status.phases, now),
        observed_generation=generation,
        state=decision.state,
        current_phase=_current_phase(decision),
        blocked_since=None,
        conditions=conditions.updated(old.conditions, wanted, generation, now),
    )


def _current_phase(decision: Decision) -> str | None:
    stage = current_stage(decision.status.phases)
    return stage.phase if stage and not decision.ended else None


def _timed(phases: Phases, now: datetime) -> Phases:
    """The phases with the times at which they began and ended, of those that have just done so."""
    return [_timed_phase(phase, clock.to_text(now)) for phase in phases]


def _timed_phase(phase: PhaseStatus, now: str) -> PhaseStatus:
    begun = phase.start_time or (now if phase.state != "Pending" else None)
    ended = phase.completion_time or (now if phase.state in ("Complete", "Failed") else None)
    return phase_with(phase, start_time=begun, completion_time=ended)


def _replicas(view: View, decision: Decision) -> Replicas:
    if decision.children is None:
        return Replicas()
    if len(view.pods) == view.workers and all(pod.phase is PodPhase.SUCCEEDED for pod in view.pods):
        # Their Job says so within a second or two, and that changes the status again.
        return view.status.replicas
    failed = sum(pod.phase is PodPhase.FAILED for pod in view.pods)
    return Replicas(desired=view.workers, ready=sum(pod.ready for pod in view.pods), failed=failed)


def _unhurried(
    old: PseudoRealJobStatus, new: PseudoRealJobStatus, now: datetime
) -> tuple[PseudoRealJobStatus, list[float]]:
    """The status without a change of progress that is no progress, or that follows too soon and comes alone; and the
    seconds after which that one is due."""
    if not old.progress or not new.progress:
        return new, []
    same_time = new.progress.model_copy(update={"last_updated_time": old.progress.last_updated_time})
    if same_time == old.progress:
        new = status_with(new, progress=old.progress)
    alone = status_with(new, progress=old.progress, checkpoint=old.checkpoint) == old
    due = clock.from_text(old.progress.last_updated_time) + timedelta(seconds=PROGRESS_SECONDS)
    if new == old or not alone or now >= due:
        return new, []
    return old, [(due - now).total_seconds()]


def _pods_to_end(view: View) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*pods_to_stop(view.seen, view.now), *pods_to_release(view))))


def _jobs_in_the_way(view: View, execution: Execution | None = None) -> Iterator[str]:
    """Jobs that run and are not that of `execution`. One whose workers have all succeeded has the result, which must
    not go before the status has it; then it ends by itself, unless a container that is not the trainer runs on."""
    running = (job for job in view.seen.jobs if job.state is JobState.ACTIVE and not job.deleting)
    others = (job for job in running if job.execution != execution)
    return (job.name for job in others if not view.is_done(job) or never_ends(view, job))


def _lost_jobs(view: View, execution: Execution | None) -> tuple[str, ...]:
    """Return the Job of `execution` if it only waits for pods that can do nothing any more, and no pod lingers: the Job
    controller takes a pod that lingers for running, so it would delete the pod before the operator has read how the
    trainer ended."""
    job = view.job if execution is not None and execution == view.execution else None
    if job is None or job.state is not JobState.ACTIVE or not job.outlives_pods or job.queued:
        return ()
    if any(pod.lingers for pod in view.pods):
        return ()
    return (job.name,) if is_lost(view.seen, view.status, view.execution, view.now) else ()


def _old_jobs(view: View) -> Iterator[str]:
    """Names of the Jobs that have ended, but for the newest of each kind; their pods go with them. A job with many
    phases, or one that is often disrupted or repeated, must not fill the cluster.

    The Job of the present execution stays in any case: the status does not have its result yet.
    """
    stage = current_stage(view.status.phases)
    present = stage.execution(view.status.execution) if stage else None
    newest_first = sorted(view.seen.jobs, key=lambda job: (job.ended or "", job.execution.number), reverse=True)
    for state, kept in KEPT_JOBS.items():
        ended = [job for job in newest_first if job.state is state and job.execution != present]
        yield from (job.name for job in ended[kept:] if not job.deleting)


def _waits(view: View, decision: Decision) -> list[float]:
    """Seconds to when the decision is to be looked at again, and to each moment at which a clock runs out. Watches and
    reports tell of all else: a job of which nothing changes is not looked at."""
    waits = [] if decision.wake_after is None else [decision.wake_after]
    waits += [(moment - view.now).total_seconds() for moment in moments(view.seen, view.now)]
    if not decision.ended and decision.suspended.status != "True":
        waits += _deadlines(view, decision)
        waits += [(moment - view.now).total_seconds() for moment in moments_of(view)]
    return [max(0.0, wait) for wait in waits]


def _deadlines(view: View, decision: Decision) -> Iterator[float]:
    """Seconds to each deadline. Those of a job that a queue holds stand still."""
    status, limits = decision.status, view.spec.deadlines
    if status.start_time is None or status.queued_since is not None:
        return
    if limits.active_seconds is not None:
        yield (active_deadline(view, limits.active_seconds) - view.now).total_seconds()
    if status.transition is not None:
        yield (clock.from_text(status.transition.deadline) - view.now).total_seconds()
    if decision.children is None or view.job is None or view.job.state is not JobState.ACTIVE:
        return
    if moment := exclusion_ends(view):
        yield (moment - view.now).total_seconds()
    if view.started_pods < view.workers:
        yield (startup_deadline(view, limits.startup_seconds) - view.now).total_seconds()
    if view.stage.kind is StageKind.TRAIN and (wait := seconds_to_stall(view)) is not None:
        # A clock runs out after its last second.
        yield wait + _MOMENT_SECONDS
