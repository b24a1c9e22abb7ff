"""Reads what a pass needs from the API server."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import structlog
from aiohttp import ClientError
from kubernetes.aio.client import ApiException
from pseudoreal_api.names import CONTAINER, LABEL_JOB, claim_name
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.observe.board import Board, JobKey, Speaker
from pseudoreal_operator.observe.case import ChildJob, Observed, Pod, PodPhase
from pseudoreal_operator.observe.last_words import LastWords
from pseudoreal_operator.observe.reading import (
    belongs_to,
    has_no_pod_left,
    is_of_another,
    newest_report,
    read_job,
    read_pod,
)
from pseudoreal_operator.observe.stages import Execution, StageKind, current_stage

Json = dict[str, Any]

LOG_LINES = 50
_POD_JOB = "batch.kubernetes.io/job-name"
"""The label by which the Job controller knows its pods."""

log = structlog.get_logger()


async def observe(
    api: Api, board: Board, words: LastWords, job: PseudoRealJob, status: PseudoRealJobStatus, now: datetime
) -> Observed:
    namespace, name, uid = job.metadata.namespace, job.metadata.name, job.metadata.uid
    # Jobs come first: when one has ended, the pods that are read after it tell how.
    jobs = [body async for body in api.each("Job", namespace, f"{LABEL_JOB}={name}")]
    own = [body for body in jobs if belongs_to(uid, body)]
    others = [_name(body) for body in jobs if is_of_another(uid, body)]
    present = _present(status, [read_job(body) for body in own])
    pods, strangers = await _pods(api, job, f"{LABEL_JOB}={name}{_without(own, present)}")
    existing = {("Job", _name(body)) for body in own}
    if claim := _claim_name(job):
        # It is made before the Job.
        is_made = any(read_job(body).execution == present for body in own)
        found = {} if is_made else await api.find("PersistentVolumeClaim", namespace, claim)
        if found and is_of_another(uid, found):
            others.append(claim)
        elif found is not None:
            existing.add(("PersistentVolumeClaim", claim))
    key, executions = (
        (namespace, uid),
        {pod.execution for pod in pods if pod.is_alive} | ({present} if present else set()),
    )
    await _read_log(api, board, key, _speaker(pods, present), now)
    return Observed(
        job=job,
        status=status,
        jobs=tuple(read_job(body) for body in own),
        pods=tuple(pods),
        existing=frozenset(existing),
        foreign=(*others, *strangers),
        heard=board.of_job(key, executions),
        gone=words.of_job(key, [pod.name for pod in pods]),
    )


def _present(status: PseudoRealJobStatus, jobs: Sequence[ChildJob]) -> Execution | None:
    """The present execution; None when there is nothing left to do."""
    stage = current_stage(status.phases) if status.phases else None
    return (
        stage.execution(max([1, status.execution_attempt, *(job.execution.number for job in jobs)])) if stage else None
    )


def _without(jobs: Sequence[Json], present: Execution | None) -> str:
    """A selector that leaves out pods of earlier executions that have all ended; they stay for their logs, and may be
    thousands."""
    over = [_name(body) for body in jobs if has_no_pod_left(body) and read_job(body).execution != present]
    return f",{_POD_JOB} notin ({','.join(sorted(over))})" if over else ""


async def _pods(api: Api, job: PseudoRealJob, selector: str) -> tuple[list[Pod], list[str]]:
    """The children of the job, and the names of those of a deleted job of its name."""
    pods: list[Pod] = []
    strangers: list[str] = []
    async for body in api.each("Pod", job.metadata.namespace, selector):
        if belongs_to(job.metadata.uid, body):
            pods.append(read_pod(body))
        elif is_of_another(job.metadata.uid, body):
            strangers.append(_name(body))
    return pods, strangers


def _claim_name(job: PseudoRealJob) -> str | None:
    """Name of the claim that the job asks for. One that somebody else made is used as it is."""
    volume = job.spec.checkpoint.volume
    return None if volume is None or volume.claim is None else claim_name(job.metadata.name)


def _speaker(pods: Sequence[Pod], present: Execution | None) -> Pod | None:
    """The pod of rank 0, which tells of the progress, if it runs."""
    if present is None or present.kind is not StageKind.TRAIN:
        return None
    return next((p for p in pods if p.phase is PodPhase.RUNNING and p.execution == present and p.index == 0), None)


async def _read_log(api: Api, board: Board, job: JobKey, speaker: Pod | None, now: datetime) -> None:
    """Reads the progress of a pod that does not report from its log. Nothing depends on it."""
    board.listen(job, speaker.execution if speaker else None, now)
    if speaker is None or not board.look_at_log(job, now):
        return
    try:
        report = newest_report(await api.log_tail(job[0], speaker.name, CONTAINER, LOG_LINES))
    except (ApiException, ClientError, OSError) as error:
        log.debug("log_unreadable", pod=speaker.name, error=str(error))
        return
    if report is not None:
        board.read_log(Speaker(job, speaker.execution, 0), report, now)


def _name(body: Json) -> str:
    return str(body["metadata"]["name"])
