"""plan(what was seen, now) -> what to make, delete, say and remember. Pure.

A plan takes one step. Nothing is remembered but the status, and the number of a new attempt is written to it before
any child of that attempt is made; so a pass may die anywhere, and the next one finds its way.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pseudoreal_api.spec import JobMetadata
from pseudoreal_api.status import PseudoRealJobStatus, Replicas

from pseudoreal_operator import clock, conditions
from pseudoreal_operator.case import Case, Step, stands
from pseudoreal_operator.endings import refuse
from pseudoreal_operator.events import Event, transitions
from pseudoreal_operator.manifests.children import children, identity
from pseudoreal_operator.observed import JobState, Observed, PodPhase, Role, Run
from pseudoreal_operator.rules import LOOK_SECONDS, RULES, start
from pseudoreal_operator.settings import Settings

PROGRESS_SECONDS = 5.0
"""Between two writes of the status for progress alone."""


@dataclass(frozen=True)
class Plan:
    """To be carried out in this order: delete Jobs (by name), apply manifests, post events, write the status."""

    status: PseudoRealJobStatus
    delete: tuple[str, ...] = ()
    apply: tuple[dict[str, Any], ...] = ()
    events: tuple[Event, ...] = ()
    wake_after: float | None = None


def plan(seen: Observed, now: datetime, settings: Settings) -> Plan:
    if conditions.has_ended(seen.status):
        return Plan(seen.status, delete=_running_jobs(seen, except_for=None))
    case = Case(seen, now)
    step = next((step for rule in RULES if (step := rule(case))), None) or start(case)
    return _carry_out(case, step, settings)


def plan_refusal(seen: Observed, sentence: str, now: datetime) -> Plan:
    """For a job whose children the API server refuses for good."""
    case = Case(seen, now)
    return _carry_out(case, refuse(case.status, sentence, now), settings=None)


def plan_unreadable(metadata: JobMetadata, status: PseudoRealJobStatus, sentence: str, now: datetime) -> Plan:
    """For a job that the API server stored and that this release cannot read."""
    if conditions.has_ended(status):
        return Plan(status)
    new = _described(status, refuse(status, sentence, now), metadata.generation, now)
    return Plan(new, events=tuple(transitions(status, new)))


def plan_hindrance(seen: Observed, sentence: str, now: datetime) -> Plan:
    """For a job whose children the API server refuses for now: by a quota or a policy, or it fails itself."""
    old = seen.status
    step = Step(old, old.phase, stands("Hindered", sentence))
    return Plan(_described(old, step, seen.job.metadata.generation, now), wake_after=LOOK_SECONDS)


def _carry_out(case: Case, step: Step, settings: Settings | None) -> Plan:
    status = _described(case.seen.status, step, case.metadata.generation, case.now)
    status = status.model_copy(update={"replicas": _replicas(case, step)})
    status = _unhurried(case.seen.status, status, case.now)
    run = step.children.run(step.memory.execution_attempt) if step.children else None
    made = children(case.seen.job, step.children, step.memory, settings) if step.children and settings else []
    return Plan(
        status,
        delete=_running_jobs(case.seen, except_for=run),
        apply=tuple(manifest for manifest in made if identity(manifest) not in case.seen.existing),
        events=tuple(transitions(case.seen.status, status)),
        wake_after=_before_deadline(case, step.wake_after),
    )


def _described(old: PseudoRealJobStatus, step: Step, generation: int, now: datetime) -> PseudoRealJobStatus:
    claims = [step.accepted, step.progressing, conditions.delinked(step.memory.phases), step.suspended]
    claims += [step.ended] if step.ended else []
    return step.memory.model_copy(
        update={
            "observed_generation": generation,
            "phase": step.summary,
            "conditions": conditions.updated(old.conditions, claims, generation, now),
        }
    )


def _replicas(case: Case, step: Step) -> Replicas:
    if step.children is None:
        return Replicas()
    desired = case.spec.phases[step.children.index].workers if step.children.role is Role.TRAIN else 1
    failed = sum(pod.phase is PodPhase.FAILED for pod in case.pods)
    return Replicas(desired=desired, ready=sum(pod.ready for pod in case.pods), failed=failed)


def _unhurried(old: PseudoRealJobStatus, new: PseudoRealJobStatus, now: datetime) -> PseudoRealJobStatus:
    """Without a change of progress that is no progress, or that follows too soon and comes alone."""
    if not old.progress or not new.progress:
        return new
    same_time = new.progress.model_copy(update={"last_updated_time": old.progress.last_updated_time})
    alone = new.model_copy(update={"progress": old.progress}) == old
    soon = now < clock.from_text(old.progress.last_updated_time) + timedelta(seconds=PROGRESS_SECONDS)
    return new.model_copy(update={"progress": old.progress}) if same_time == old.progress or (alone and soon) else new


def _running_jobs(seen: Observed, *, except_for: Run | None) -> tuple[str, ...]:
    running = (job for job in seen.jobs if job.state is JobState.ACTIVE and not job.deleting)
    return tuple(job.name for job in running if job.run != except_for)


def _before_deadline(case: Case, wake_after: float | None) -> float | None:
    allowed, begun = case.spec.deadlines.active_seconds, case.status.start_time
    if allowed is None or begun is None:
        return wake_after
    left = (clock.from_text(begun) + timedelta(seconds=allowed) - case.now).total_seconds()
    return max(0.0, left) if wake_after is None else max(0.0, min(wake_after, left))
