"""One operator at a time: a Lease that is held while the operator runs, by the rules of client-go.

A Deployment that recreates its pod may still leave two of them for a while, when a node is cut off.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import structlog
from aiohttp import ClientError
from kubernetes.aio.client import ApiException

from pseudoreal_operator.api import Api

Json = dict[str, Any]

DURATION_SECONDS = 15
"""After that long without a renewal somebody else may take the lease."""
RENEW_SECONDS = 10.0
"""After that long without a renewal of its own an operator ends itself."""
RETRY_SECONDS = 2.0

log = structlog.get_logger()


@dataclass(frozen=True)
class Lease:
    namespace: str
    name: str
    holder: str


@dataclass(frozen=True)
class _Seen:
    """A version of the lease, and when it was first seen: clocks of other machines are not compared."""

    version: str
    moment: float


@asynccontextmanager
async def keep_lease(api: Api, lease: Lease) -> AsyncIterator[None]:
    """Waits until the lease is free, and holds it. When it is lost, the task that entered is cancelled."""
    await _acquire(api, lease)
    log.info("lease_acquired", holder=lease.holder)
    owner = asyncio.current_task()
    assert owner is not None, "this runs in a task"
    renewal = asyncio.create_task(_renew(api, lease, owner), name="lease")
    try:
        yield
    finally:
        renewal.cancel()
        with suppress(asyncio.CancelledError):
            await renewal
        with suppress(ApiException, ClientError, OSError):
            await _try(api, replace(lease, holder=""), None, of=lease.holder)


async def _acquire(api: Api, lease: Lease) -> None:
    seen: _Seen | None = None
    while True:
        try:
            seen = await _try(api, lease, seen, of=lease.holder)
        except (ApiException, ClientError, OSError) as error:
            log.warning("lease_unreachable", error=str(error))
        else:
            if seen is None:
                return
        await asyncio.sleep(RETRY_SECONDS)


async def _renew(api: Api, lease: Lease, owner: "asyncio.Task[Any]") -> None:
    renewed = time.monotonic()
    while time.monotonic() - renewed < RENEW_SECONDS:
        await asyncio.sleep(RETRY_SECONDS)
        with suppress(ApiException, ClientError, OSError, TimeoutError):
            async with asyncio.timeout(RETRY_SECONDS):
                if await _try(api, lease, _Seen("", time.monotonic()), of=lease.holder) is None:
                    renewed = time.monotonic()
                else:
                    break
    log.error("lease_lost", holder=lease.holder)
    owner.cancel()


async def _try(api: Api, lease: Lease, seen: _Seen | None, *, of: str) -> _Seen | None:
    """Writes the lease if it is ours, free or run out; None when that is done, else what was seen of it."""
    found = await api.find("Lease", lease.namespace, lease.name)
    if found is None:
        await api.create(_manifest(lease))
        return None
    version, holder = found["metadata"]["resourceVersion"], found["spec"].get("holderIdentity") or ""
    if holder not in ("", of):
        if seen is None or seen.version != version:
            return _Seen(version, time.monotonic())
        if time.monotonic() - seen.moment < DURATION_SECONDS:
            return seen
    # With the version, so that of two who try one fails.
    patch = _manifest(lease)
    patch["metadata"]["resourceVersion"] = version
    await api.merge("Lease", lease.namespace, lease.name, patch)
    return None


def _manifest(lease: Lease) -> Json:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": lease.name, "namespace": lease.namespace},
        "spec": {
            "holderIdentity": lease.holder,
            "leaseDurationSeconds": DURATION_SECONDS,
            "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        },
    }
