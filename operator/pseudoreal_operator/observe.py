"""Reads what a pass needs from the API server."""

import asyncio
from typing import Any

import structlog
from aiohttp import ClientError
from kubernetes.aio.client import ApiException
from pseudoreal_api.messages import ProgressReport
from pseudoreal_api.names import CONTAINER, LABEL_JOB
from pseudoreal_api.spec import PseudoRealJob
from pseudoreal_api.status import PseudoRealJobStatus

from pseudoreal_operator.api import Api
from pseudoreal_operator.observed import Observed, Pod, PodPhase, Role
from pseudoreal_operator.reading import belongs_to, newest_report, read_job, read_pod

Json = dict[str, Any]

OTHER_KINDS = ("ConfigMap", "Service", "NetworkPolicy", "Pod")
LOG_LINES = 50

log = structlog.get_logger()


async def observe(api: Api, job: PseudoRealJob, status: PseudoRealJobStatus) -> Observed:
    namespace, name = job.metadata.namespace, job.metadata.name
    # Jobs come first: when one has ended, the pods that are read after it tell how.
    by_kind = {"Job": await api.list("Job", namespace, f"{LABEL_JOB}={name}")}
    lists = await asyncio.gather(*(api.list(kind, namespace, f"{LABEL_JOB}={name}") for kind in OTHER_KINDS))
    by_kind |= dict(zip(OTHER_KINDS, lists, strict=True))
    own = {kind: [c for c in found if belongs_to(job.metadata.uid, c)] for kind, found in by_kind.items()}
    pods = tuple(read_pod(body) for body in own["Pod"])
    return Observed(
        job=job,
        status=status,
        jobs=tuple(read_job(body) for body in own["Job"]),
        pods=pods,
        existing=frozenset((kind, _name(body)) for kind in own for body in own[kind]),
        foreign=tuple(_name(body) for kind in by_kind for body in by_kind[kind] if body not in own[kind]),
        report=await _live_report(api, namespace, pods),
    )


async def _live_report(api: Api, namespace: str, pods: tuple[Pod, ...]) -> ProgressReport | None:
    """What the first worker of the running attempt logged last; nothing depends on it."""
    speaker = next((p for p in pods if p.phase is PodPhase.RUNNING and p.run.role is Role.TRAIN and p.index == 0), None)
    if speaker is None:
        return None
    try:
        return newest_report(await api.log_tail(namespace, speaker.name, CONTAINER, LOG_LINES))
    except (ApiException, ClientError, OSError) as error:
        log.debug("log_unreadable", pod=speaker.name, error=str(error))
        return None


def _name(body: Json) -> str:
    return str(body["metadata"]["name"])
