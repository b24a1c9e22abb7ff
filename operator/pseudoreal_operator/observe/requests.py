"""Reads what a pass needs from the API server."""

from datetime import datetime
from typing import Any

import structlog
from aiohttp import ClientError
from kubernetes.aio.client import ApiException
from pseudoreal_api.names import CONTAINER, LABEL_JOB, claim_name
from pseudoreal_api.spec import PseudoRealJob
from pseudoreal_api.status import PseudoRealJobStatus

from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.observe.board import QUIET_SECONDS, Board, JobKey, Speaker
from pseudoreal_operator.observe.observed import Heard, Observed, Pod, PodPhase, Role, Run
from pseudoreal_operator.observe.reading import belongs_to, is_of_another, newest_report, read_job, read_pod

Json = dict[str, Any]

LOG_LINES = 50

log = structlog.get_logger()


async def observe(api: Api, board: Board, job: PseudoRealJob, status: PseudoRealJobStatus, now: datetime) -> Observed:
    namespace, name, uid = job.metadata.namespace, job.metadata.name, job.metadata.uid
    # Jobs come first: when one has ended, the pods that are read after it tell how.
    by_kind = {kind: await api.list(kind, namespace, f"{LABEL_JOB}={name}") for kind in ("Job", "Pod")}
    own = {kind: [c for c in found if belongs_to(uid, c)] for kind, found in by_kind.items()}
    others = [c for found in by_kind.values() for c in found if is_of_another(uid, c)]
    if claim := await _claim(api, job):
        (others if is_of_another(uid, claim) else own.setdefault("PersistentVolumeClaim", [])).append(claim)
    pods = tuple(read_pod(body) for body in own["Pod"])
    heard = board.of_job((namespace, uid), _alive(pods))
    if await _read_log(api, board, (namespace, uid), _unheard(pods, heard, now), now):
        heard = board.of_job((namespace, uid), _alive(pods))
    return Observed(
        job=job,
        status=status,
        jobs=tuple(read_job(body) for body in own["Job"]),
        pods=pods,
        existing=frozenset((kind, _name(body)) for kind in own for body in own[kind]),
        foreign=tuple(_name(body) for body in others),
        heard=heard,
    )


async def _claim(api: Api, job: PseudoRealJob) -> Json | None:
    """The claim that the job asks for. One that somebody else made is used as it is."""
    volume = job.spec.checkpoint.volume
    if volume is None or volume.claim is None:
        return None
    return await api.find("PersistentVolumeClaim", job.metadata.namespace, claim_name(job.metadata.name))


def _alive(pods: tuple[Pod, ...]) -> set[Run]:
    """Ended pods may stay for ever, for their logs; what they reported need not."""
    return {pod.run for pod in pods if pod.is_alive}


def _unheard(pods: tuple[Pod, ...], heard: tuple[Heard, ...], now: datetime) -> Pod | None:
    """The pod of rank 0, if it runs and does not report."""
    speaker = next((p for p in pods if p.phase is PodPhase.RUNNING and p.run.role is Role.TRAIN and p.index == 0), None)
    if speaker is None:
        return None
    last = next((h.last for h in heard if (h.run, h.index) == (speaker.run, 0)), None)
    return speaker if last is None or (now - last).total_seconds() > QUIET_SECONDS else None


async def _read_log(api: Api, board: Board, job: JobKey, speaker: Pod | None, now: datetime) -> bool:
    """Whether the log of that pod had something to say. Nothing depends on it."""
    if speaker is None:
        return False
    try:
        report = newest_report(await api.log_tail(job[0], speaker.name, CONTAINER, LOG_LINES))
    except (ApiException, ClientError, OSError) as error:
        log.debug("log_unreadable", pod=speaker.name, error=str(error))
        return False
    if report is not None:
        board.read_log(Speaker(job, speaker.run, 0), report, now)
    return report is not None


def _name(body: Json) -> str:
    return str(body["metadata"]["name"])
