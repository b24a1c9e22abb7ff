"""plan(observed, now, settings) -> objects to create and delete, status to write, events to post. Pure.

A plan carries out one decision. The status is the only memory, and the number of a new execution is written to the
status before any child of that execution is created. So a reconcile pass may die at any point, and the next pass
continues from the status and the children.

Within one plan, children come before the status: a status that says that a stage has started promises that its Job was
created. If the operator died between the two in the other order, the rule `child_job_deleted` would conclude that
someone else had deleted the Job.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from pseudoreal_api.spec.job import JobMetadata
from pseudoreal_api.status.status import (
    MOST_NODES,
    MOST_RANGES,
    NodeRanks,
    PhaseStatus,
    Placement,
    PseudoRealJobStatus,
    Replicas,
)

from pseudoreal_operator import clock
from pseudoreal_operator.changes import phase_with, status_with
from pseudoreal_operator.failures.hang import seconds_to_hang
from pseudoreal_operator.lifecycle.acceptance import find_problem_now
from pseudoreal_operator.lifecycle.clocks import pod_moments
from pseudoreal_operator.lifecycle.deadlines import (
    active_deadline,
    blocked_deadline,
    exclusion_ends,
    have_all_started,
    startup_deadline,
)
from pseudoreal_operator.lifecycle.decisions import Decision, not_progressing, pod_error_sentence, reject_job
from pseudoreal_operator.lifecycle.elastic import elastic_moments
from pseudoreal_operator.lifecycle.in_place import count_restarts_in_place
from pseudoreal_operator.lifecycle.rules import decide
from pseudoreal_operator.lifecycle.stopping import is_doomed, never_ends, pods_to_release, pods_to_stop
from pseudoreal_operator.manifests.objects import children, claim_manifest, kind_and_name
from pseudoreal_operator.observe.ranks import first_ranks, ranges_text
from pseudoreal_operator.observe.stages import (
    Execution,
    StageKind,
    all_stages,
    current_stage,
    has_begun,
    with_served,
)
from pseudoreal_operator.observe.view import JobState, Observed, View
from pseudoreal_operator.settings import Settings
from pseudoreal_operator.status import conditions
from pseudoreal_operator.status.conditions import NewCondition, not_accepted
from pseudoreal_operator.status.events import Event

BLOCKED_SECONDS, MOST_BLOCKED_SECONDS = 5.0, 300.0
"""Seconds between two attempts to create children that the API server rejects: initial value and maximum."""
PROGRESS_SECONDS = 10.0
"""Minimum seconds between two status writes that change nothing but progress."""
_MOMENT_SECONDS = 0.1
KEPT_JOBS = {JobState.COMPLETE: 5, JobState.FAILED: 5}
"""Outcome -> number of ended Jobs that are kept for the logs of their pods while the job runs."""


@dataclass(frozen=True)
class Plan:
    """Effects of one reconcile pass, carried out in this order: dry run, stop pods, fail Jobs, delete Jobs (all by
    name), apply manifests, write the status, post events. The dry run comes first: a rejection leaves everything else
    undone. Events come last: they announce what the status says."""

    status: PseudoRealJobStatus
    dry_run: tuple[dict[str, Any], ...] = ()
    """Manifests for a dry run before every other effect: the children of all stages, when the job is first seen,
    resumed or prolonged. An object that the API server rejects is found before weeks of training, not after them."""
    expire: bool = False
    """Whether to delete the job itself and do nothing else."""
    stop: tuple[str, ...] = ()
    fail_jobs: tuple[str, ...] = ()
    """Names of Jobs to fail now (maxFailedIndexes: 0): their pods end, the Jobs stay."""
    delete: tuple[str, ...] = ()
    apply: tuple[dict[str, Any], ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None
    """Seconds until the next pass; None: wait for a change."""


def plan(observed: Observed, now: datetime, settings: Settings) -> Plan:
    """Return the plan of one reconcile pass: count restarts in place, then let the first rule that applies decide.
    Restarts in place are counted first, because rules compare spec.restart with the restarts that are used up."""
    view = View(observed, now)
    if conditions.has_ended(observed.status):
        return _plan_ended(view)
    counting, restart_events = count_restarts_in_place(view)
    view = view if counting is observed else View(counting, now)
    decision = decide(view)
    decision = replace(decision, events=(*restart_events, *decision.events))
    return (_with_dry_run if decision.with_dry_run else _to_plan)(view, decision, settings)


def _with_dry_run(view: View, decision: Decision, settings: Settings) -> Plan:
    try:
        stages = all_stages(view.spec)
        dry_run = [
            manifest for stage in stages for manifest in children(view.observed.job, stage, decision.status, settings)
        ]
    except Exception as error:  # a template may hold anything: report the error in the status
        return _to_plan(view, reject_job(view.status, pod_error_sentence(error), view.now), settings)
    return replace(_to_plan(view, decision, settings), dry_run=tuple(dry_run))


def _plan_ended(view: View) -> Plan:
    """Return the plan for a job that has ended: end its pods, and delete its Jobs or, if spec.cleanUp.children is
    Keep, only the Jobs that still run. Once ttlSecondsAfterFinished is over, delete the job itself."""
    observed, ttl = view.observed, view.spec.deadlines.ttl_seconds_after_finished
    waits = [(moment - view.now).total_seconds() for moment in pod_moments(observed, view.now)]
    if ttl is not None and observed.status.completion_time:
        left = (clock.from_text(observed.status.completion_time) + timedelta(seconds=ttl) - view.now).total_seconds()
        if left <= 0:
            return Plan(observed.status, expire=True)
        waits.append(left)
    # Tools that compare generations (kstatus: Flux, kpt, Helm) read an older observedGeneration as work in progress.
    status = status_with(observed.status, observed_generation=view.metadata.generation)
    kept = view.spec.clean_up.children == "Keep"
    jobs = tuple(_other_running_jobs(view) if kept else (job.name for job in observed.jobs if not job.deleting))
    return Plan(status, stop=_pods_to_end(view), delete=jobs, requeue_after=min(waits, default=None))


def plan_rejected(observed: Observed, sentence: str, now: datetime) -> Plan:
    """Return the plan for a job whose children the API server rejects as invalid. A job that has begun is blocked, not
    failed: its children were valid before, so a new policy or another release of Kubernetes rejects them. The trained
    state must not be lost for this reason."""
    view = View(observed, now)
    if conditions.has_ended(view.status) or has_begun(view.status):
        return plan_blocked(observed, sentence, now)
    return _to_plan(view, reject_job(view.status, sentence, now), settings=None)


def plan_unreadable(metadata: JobMetadata, status: PseudoRealJobStatus, sentence: str, now: datetime) -> Plan:
    """Return the plan for a job that the API server stored and this release cannot read, for instance while another
    release takes over."""
    return _plan_without_progress(metadata, status, not_progressing("Unreadable", sentence), now)


def plan_blocked(observed: Observed, sentence: str, now: datetime) -> Plan:
    """Return the plan for a job whose children the API server rejects for now: by a quota, by a policy, or because
    the API server itself fails."""
    return _blocked(observed, not_progressing("Blocked", sentence), now)


def plan_conflict(observed: Observed, sentence: str, now: datetime) -> Plan:
    """Return the plan for a job if the name of one of its children is taken by an object that does not belong to the
    job."""
    return _blocked(observed, not_progressing("NameConflict", sentence), now)


def _blocked(observed: Observed, why: NewCondition, now: datetime) -> Plan:
    """Return the plan for a job that waits until the API server accepts its children. Each wait is as long as all
    earlier waits together, so that jobs held up by a quota send few requests."""
    waiting = _plan_without_progress(observed.job.metadata, observed.status, why, now)
    ended = conditions.has_ended(observed.status)
    since = (observed.status.completion_time if ended else observed.status.blocked_since) or clock.to_text(now)
    status = waiting.status if ended else status_with(waiting.status, blocked_since=since)
    waits = [max(BLOCKED_SECONDS, (now - clock.from_text(since)).total_seconds()), MOST_BLOCKED_SECONDS]
    deadline = blocked_deadline(View(replace(observed, status=status), now))
    if deadline is not None and deadline > now:
        waits.append((deadline - now).total_seconds())
    return replace(waiting, status=status, requeue_after=min(waits))


def _plan_without_progress(
    metadata: JobMetadata, status: PseudoRealJobStatus, why: NewCondition, now: datetime
) -> Plan:
    """Return a plan that decides nothing: keep the status, except for the reason why the job does not progress."""
    status = status_with(status, observed_generation=metadata.generation)
    if conditions.has_ended(status):
        return Plan(status)
    kept = conditions.with_condition(status.conditions, why, metadata.generation, now)
    return Plan(status_with(status, conditions=kept))


def _to_plan(view: View, decision: Decision, settings: Settings | None) -> Plan:
    status = _complete_status(view, decision)
    status = status_with(status, replicas=_replicas(view, decision), placement=placement(view))
    status, progress_waits = _rate_limit_progress(view.observed.status, status, view.now)
    execution = decision.children.execution(decision.status.execution) if decision.children else None
    manifests = _manifests_to_create(view, decision, settings) if settings else []
    # The status must say why a Job is deleted (a new execution's number, or the job's end) before the Job is deleted.
    # If an operator died between the two in the other order, the next pass would conclude that someone else deleted the
    # Job. The status must also have the start of the execution: once its Job is deleted, only the status tells that the
    # number of the execution is used up.
    announced = status.execution > view.observed.status.execution > 0 or decision.ended is not None
    keeps_jobs = announced or view.has_unrecorded_start
    waits = [*_waits(view, decision), *progress_waits, *([0.0] if view.has_unrecorded_start else [])]
    # A takeover saves an execution that counts as doomed without it: the observation has the members from before. The
    # next pass, which follows at once, stops the replaced pods.
    takes_over = status.spares != view.observed.status.spares
    return Plan(
        status,
        stop=() if takes_over else _pods_to_end(view),
        fail_jobs=() if takes_over else _jobs_to_fail(view, execution),
        delete=() if keeps_jobs else (*_other_running_jobs(view, execution), *_jobs_beyond_history(view)),
        apply=tuple(manifests),
        events=decision.events,
        requeue_after=min(waits, default=None),
    )


def _manifests_to_create(view: View, decision: Decision, settings: Settings) -> list[dict[str, Any]]:
    if decision.children is None:
        return []
    volume, execution = claim_manifest(view.observed.job), decision.children.execution(decision.status.execution)
    manifests = [volume] if volume and kind_and_name(volume) not in view.observed.existing else []
    if any(child.execution == execution for child in view.observed.jobs):
        # The Job is created last, so all other children exist.
        return manifests
    made = children(view.observed.job, decision.children, decision.status, settings, view.observed.claims)
    return [*manifests, *made]


def _complete_status(view: View, decision: Decision) -> PseudoRealJobStatus:
    """Return the status to write: the decision's status, completed with conditions, state, phase times and served
    requests."""
    old, generation, now = view.observed.status, view.metadata.generation, view.now
    is_checked = decision.ended or _was_accepted(old, generation)
    problem = None if is_checked else find_problem_now(view.spec, view.metadata.name, decision.status.phases)
    accepted = not_accepted(problem) if problem else decision.accepted
    delinked = conditions.delinked_condition(view.spec, decision.status.phases)
    wanted = [accepted, decision.progressing, delinked, decision.suspended]
    wanted += [decision.ended] if decision.ended else []
    return status_with(
        with_served(view.spec, decision.status),
        phases=[_with_times(phase, clock.to_text(now)) for phase in decision.status.phases],
        observed_generation=generation,
        state=decision.state,
        current_phase=_current_phase(decision),
        blocked_since=None,
        conditions=conditions.merge_conditions(old.conditions, wanted, generation, now),
    )


def _was_accepted(status: PseudoRealJobStatus, generation: int) -> bool:
    """Return whether an earlier pass has found this generation of the spec valid.

    The check costs more than the rest of a plan, and an operator plans for all jobs at once when it takes over. Each
    phase is checked again when it starts.
    """
    accepted = conditions.find(status, "Accepted")
    return accepted is not None and (accepted.status, accepted.observed_generation) == ("True", generation)


def _current_phase(decision: Decision) -> str | None:
    stage = current_stage(decision.status.phases)
    return stage.phase if stage and not decision.ended else None


def _with_times(phase: PhaseStatus, now: str) -> PhaseStatus:
    """Return the phase with its start or completion time set if it has just begun or ended."""
    begun = phase.start_time or (now if phase.state != "Pending" else None)
    ended = phase.completion_time or (now if phase.state in ("Complete", "Failed") else None)
    return phase_with(phase, start_time=begun, completion_time=ended)


def _replicas(view: View, decision: Decision) -> Replicas:
    if decision.children is None:
        return Replicas()
    if len(view.pods) == view.workers and len(view.pods.succeeded) == len(view.pods):
        # Keep the old counts: the Job completes within a second or two, which changes the status again.
        return view.status.replicas
    return Replicas(desired=view.workers, ready=view.pods.ready, failed=len(view.pods.failed))


def _rate_limit_progress(
    old: PseudoRealJobStatus, new: PseudoRealJobStatus, now: datetime
) -> tuple[PseudoRealJobStatus, list[float]]:
    """Return the status to write now, and the seconds after which a postponed change is due. Progress that differs only
    in its time is dropped. A change of only progress and checkpoint is postponed until PROGRESS_SECONDS after the last
    stored progress."""
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
    return tuple(dict.fromkeys((*pods_to_stop(view.observed, view.now), *pods_to_release(view))))


def _other_running_jobs(view: View, execution: Execution | None = None) -> Iterator[str]:
    """Return the names of running Jobs other than the Job of `execution`. A Job with only succeeded workers is left
    out: the Job ends by itself, and the status must have its result before a deletion. The exception is a Job that a
    container other than the trainer keeps running (`never_ends`)."""
    running = (job for job in view.observed.jobs if job.state is JobState.ACTIVE and not job.deleting)
    others = (job for job in running if job.execution != execution)
    return (job.name for job in others if not view.is_done(job) or never_ends(view, job))


def _jobs_to_fail(view: View, execution: Execution | None) -> tuple[str, ...]:
    """Return the name of the Job of `execution` if the execution is doomed: the Job only waits for its pods. Return no
    name while a pod lingers: the Job controller counts a lingering pod as running, and would delete the pod before the
    operator has read how the trainer ended."""
    job = view.job if execution is not None and execution == view.execution else None
    if job is None or job.state is not JobState.ACTIVE or not job.outlives_pods or job.queued:
        return ()
    if any(pod.lingers for pod in view.pods.terminated):
        return ()
    return (job.name,) if is_doomed(view.observed, view.status, view.execution, view.now) else ()


def _jobs_beyond_history(view: View) -> Iterator[str]:
    """Yield the names of ended Jobs beyond the newest KEPT_JOBS of each outcome; their pods are deleted with them. A
    job with many phases, disruptions or repetitions must not fill the cluster.

    The Job of the present execution is always kept: the status does not have its result yet.
    """
    stage = current_stage(view.status.phases)
    present = stage.execution(view.status.execution) if stage else None
    newest_first = sorted(view.observed.jobs, key=lambda job: (job.ended or "", job.execution.number), reverse=True)
    for state, kept in KEPT_JOBS.items():
        ended = [job for job in newest_first if job.state is state and job.execution != present]
        yield from (job.name for job in ended[kept:] if not job.deleting)


def _waits(view: View, decision: Decision) -> list[float]:
    """Return the seconds until the pass that the decision asks for, and until each moment at which a clock runs out.
    Watches and reports signal every other change, so a job that does not change needs no pass."""
    waits = [] if decision.requeue_after is None else [decision.requeue_after]
    waits += [(moment - view.now).total_seconds() for moment in pod_moments(view.observed, view.now)]
    if not decision.ended and decision.suspended.status != "True":
        waits += _deadline_waits(view, decision)
        waits += [(moment - view.now).total_seconds() for moment in elastic_moments(view)]
    return [max(0.0, wait) for wait in waits]


def _deadline_waits(view: View, decision: Decision) -> Iterator[float]:
    """Yield the seconds until each deadline; none while a queue holds the job, because its clocks stand still."""
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
    if not have_all_started(view):
        yield (startup_deadline(view, limits.startup_seconds) - view.now).total_seconds()
    if view.unplaced_pods and any(claim.is_unbound for claim in view.observed.claims):
        # Claims are not watched. Each wait is as long as all earlier ones together.
        waited = (view.now - startup_deadline(view, 0)).total_seconds()
        yield min(max(BLOCKED_SECONDS, waited), MOST_BLOCKED_SECONDS)
    if view.stage.kind is StageKind.TRAIN and (wait := seconds_to_hang(view)) is not None:
        # A clock runs out only beyond its limit (waited > allowed), not exactly at its limit.
        yield wait + _MOMENT_SECONDS


def placement(view: View) -> Placement | None:
    """Return the placement of the present execution once the nodes of all its ranks are known; until then the previous
    placement (None: none was recorded)."""
    known = view.observed.status.placement
    stage = current_stage(view.status.phases)
    if stage is None or stage.kind is not StageKind.TRAIN:
        return known
    nodes = view.pods.nodes
    # With a topology only the pods know their ranks.
    ranks_known = view.spec.scheduling.topology is None or len(view.reported_first_ranks) == view.workers
    if nodes.keys() != set(range(view.workers)) or not ranks_known:
        return known
    return _placement(view, nodes)


def _placement(view: View, nodes: dict[int, str]) -> Placement:
    """Return the placement. `nodes`: worker number -> node."""
    size, execution = view.ranks_per_pod, view.execution
    firsts = first_ranks(view.workers, size, view.reported_first_ranks)
    on_node: dict[str, list[int]] = {}
    for worker in sorted(nodes, key=firsts.__getitem__):
        node = nodes[worker]
        if node in on_node:
            on_node[node].append(worker)
        elif len(on_node) < MOST_NODES:
            on_node[node] = [worker]
    found = []
    for node, workers in on_node.items():
        ranks = ranges_text(rank for worker in workers for rank in range(firsts[worker], firsts[worker] + size))
        numbers = ranges_text(workers)
        if max(len(ranks), len(numbers)) <= MOST_RANGES:
            found.append(NodeRanks(node=node, ranks=ranks, workers=numbers))
    omitted = len(set(nodes.values())) - len(found)
    return Placement(phase_name=execution.phase, execution=execution.number, nodes=found, omitted_nodes=omitted)
