"""Reads what a pass needs from the API server."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from pseudoreal_api.names import LABEL_JOB, claim_name
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.observe.board import Board, Speaker
from pseudoreal_operator.observe.last_words import LastWords
from pseudoreal_operator.observe.reading import (
    belongs_to,
    has_no_pod_left,
    is_of_another,
    is_orphan,
    read_job,
    read_pod,
)
from pseudoreal_operator.observe.seats import memberships, seated
from pseudoreal_operator.observe.sightings import Sightings
from pseudoreal_operator.observe.stages import Execution, StageKind, current_stage, with_added
from pseudoreal_operator.observe.view import ChildJob, Observed, Pod, PodPhase

Json = dict[str, Any]

_POD_JOB = "batch.kubernetes.io/job-name"
"""The label by which the Job controller knows its pods."""


async def observe(
    api: Api,
    board: Board,
    words: LastWords,
    sightings: Sightings,
    job: PseudoRealJob,
    status: PseudoRealJobStatus,
    now: datetime,
) -> Observed:
    namespace, name, uid = job.metadata.namespace, job.metadata.name, job.metadata.uid
    # Jobs come first: when one has ended, the pods that are read after it tell how.
    bodies = [body async for body in api.each("Job", namespace, f"{LABEL_JOB}={name}")]
    own = [body for body in bodies if belongs_to(uid, body)]
    others = [_name(body) for body in bodies if is_of_another(uid, body)]
    jobs = [read_job(body) for body in own]
    pods, strangers, orphans = await _pods(api, job, f"{LABEL_JOB}={name}{_without(own, present(job, status, jobs))}")
    jobs, pods = sightings.dated((namespace, uid), status, jobs, pods, now)
    claims = []
    if not has_claim(job, status, jobs) and (claim := claim_of(job)):
        found = await api.find("PersistentVolumeClaim", namespace, claim)
        if found and is_of_another(uid, found):
            others.append(claim)
        elif found is not None:
            claims.append(claim)
    gone = words.of_job((namespace, uid), [pod.name for pod in pods])
    seen = together(board, job, status, jobs, pods, now, gone)
    return replace(
        seen,
        existing=seen.existing | {("PersistentVolumeClaim", claim) for claim in claims},
        foreign=(*others, *strangers),
        orphans=tuple(orphans),
    )


def together(
    board: Board,
    job: PseudoRealJob,
    status: PseudoRealJobStatus,
    jobs: Sequence[ChildJob],
    pods: Sequence[Pod],
    now: datetime,
    gone: tuple[Pod, ...] = (),
) -> Observed:
    """What was seen of a job and its children, and what its pods have said. The board listens to them from now on."""
    key, execution = (job.metadata.namespace, job.metadata.uid), present(job, status, jobs)
    first = _first_index(status, execution)
    pod = _speaker(pods, execution, first)
    board.listen(key, Speaker(key, pod.execution, first, pod.name) if pod else None, now)
    executions = {pod.execution for pod in pods if pod.is_alive} | ({execution} if execution else set())
    claim = claim_of(job)
    claims = {("PersistentVolumeClaim", claim)} if claim and has_claim(job, status, jobs) else set()
    seen = Observed(
        job=job,
        status=status,
        jobs=tuple(jobs),
        pods=tuple(pods),
        existing=frozenset({("Job", one.name) for one in jobs} | claims),
        heard=board.of_job(key, executions),
        gone=gone,
        unheard_since=board.unheard_since(key, now),
        was_heard=board.was_heard(key),
        path_is_cut=board.path_is_cut,
    )
    return seated(seen)


def has_claim(job: PseudoRealJob, status: PseudoRealJobStatus, jobs: Sequence[ChildJob]) -> bool:
    """Whether the claim of the job is known to be there: it is made before the Job of the present execution."""
    execution = present(job, status, jobs)
    return any(one.execution == execution for one in jobs)


def present(job: PseudoRealJob, status: PseudoRealJobStatus, jobs: Sequence[ChildJob]) -> Execution | None:
    """The present execution; None when there is nothing left to do."""
    stage = current_stage(with_added(status.phases, job.spec))
    return stage.execution(max([1, status.execution, *(job.execution.number for job in jobs)])) if stage else None


def _without(jobs: Sequence[Json], present: Execution | None) -> str:
    """A selector that leaves out pods of earlier executions that have all ended; they stay for their logs, and may be
    thousands."""
    over = [_name(body) for body in jobs if has_no_pod_left(body) and read_job(body).execution != present]
    return f",{_POD_JOB} notin ({','.join(sorted(over))})" if over else ""


async def _pods(api: Api, job: PseudoRealJob, selector: str) -> tuple[list[Pod], list[str], list[str]]:
    """The children of the job, the names of those of a deleted job of its name, and of its pods without a Job."""
    pods: list[Pod] = []
    strangers: list[str] = []
    orphans: list[str] = []
    async for body in api.each("Pod", job.metadata.namespace, selector):
        if belongs_to(job.metadata.uid, body):
            pods.append(read_pod(body))
        elif is_of_another(job.metadata.uid, body):
            strangers.append(_name(body))
        elif is_orphan(job.metadata.uid, body):
            orphans.append(_name(body))
    return pods, strangers, orphans


def claim_of(job: PseudoRealJob) -> str | None:
    """Name of the claim that the job asks for. One that somebody else made is used as it is."""
    volume = job.spec.checkpoint.storage.mounted
    return None if volume is None or volume.claim_name is not None else claim_name(job.metadata.name)


def _first_index(status: PseudoRealJobStatus, execution: Execution | None) -> int:
    """Completion index of the pod of worker 0."""
    membership = memberships(status).get(execution) if execution else None
    return membership.pod_of(0) if membership else 0


def _speaker(pods: Sequence[Pod], present: Execution | None, first: int) -> Pod | None:
    """The pod of rank 0, which tells of the progress, if it runs."""
    if present is None or present.kind is not StageKind.TRAIN:
        return None
    return next((p for p in pods if p.phase is PodPhase.RUNNING and p.execution == present and p.index == first), None)


def _name(body: Json) -> str:
    return str(body["metadata"]["name"])
