"""Frees deleted jobs that kopf has forgotten.

kopf takes its finalizer off when it sees that a job is deleted. When the API server refuses that request, for instance
because a webhook is down for minutes, no event brings the job back (kopf 1.45.2).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.cluster.finalizer import FINALIZER, release_one

LOOK_SECONDS = 30.0
"""Longer than kopf needs."""

log = structlog.get_logger()


@asynccontextmanager
async def free_forgotten(api: Api, namespaces: tuple[str, ...], every: float = LOOK_SECONDS) -> AsyncIterator[None]:
    """Looks again and again while it is entered."""
    looking = asyncio.create_task(_look_for_ever(api, namespaces, every), name="forgotten jobs")
    try:
        yield
    finally:
        looking.cancel()


async def _look_for_ever(api: Api, namespaces: tuple[str, ...], every: float) -> None:
    """What two looks in a row find deleted and not free is forgotten."""
    waiting: set[str] = set()
    while True:
        await asyncio.sleep(every)
        try:
            waiting = await _look(api, namespaces, waiting)
        except Exception as error:
            log.warning("look_failed", error=f"{type(error).__name__}: {error}")


async def _look(api: Api, namespaces: tuple[str, ...], waiting: set[str]) -> set[str]:
    """The uids of the deleted jobs that are not free."""
    jobs = [job for namespace in namespaces or (None,) for job in await api.list("PseudoRealJob", namespace)]
    deleted = [job["metadata"] for job in jobs if "deletionTimestamp" in job["metadata"]]
    found = {str(metadata["uid"]) for metadata in deleted if FINALIZER in metadata.get("finalizers", [])}
    for metadata in deleted:
        if metadata["uid"] in found & waiting:
            await release_one(api, metadata)
    return found
