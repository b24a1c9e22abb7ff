"""One operator at a time: a Lease that is held while the operator runs, by the rules of client-go.

A Deployment that recreates its pod may still leave two of them for a while, when a node is cut off.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import structlog
from aiohttp import ClientError
from kubernetes.aio.client import ApiException

from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.settings import Lease

Json = dict[str, Any]

_FAILURES = (ApiException, ClientError, OSError)

log = structlog.get_logger()


@dataclass(frozen=True)
class Times:
    """Seconds. Between `renew` and `duration` an operator that lost the lease has time to end.

    Four times what client-go has: jobs train on without an operator, while one that ends whenever the API server is
    slow for ten seconds is soon kept from starting by CrashLoopBackOff. Who ends in order hands over at once.
    """

    duration: float = 60.0
    """After that long without a renewal somebody else may take the lease."""
    renew: float = 40.0
    """After that long without a renewal of its own an operator ends itself."""
    request: float = 5.0
    retry: float = 2.0


TIMES = Times()


@dataclass(frozen=True)
class _Seen:
    """A version of the lease, and when it was first seen: clocks of other machines are not compared."""

    version: str
    moment: float
    holder: str


class LeaseLost(Exception):
    """Somebody else holds the lease, or may hold it by now."""


@asynccontextmanager
async def keep_lease(api: Api, lease: Lease, times: Times = TIMES) -> AsyncIterator[None]:
    """Waits until the lease is free, and holds it. Raises LeaseLost, having cancelled what runs inside."""
    asked = await _acquire(api, lease, times)
    log.info("lease_acquired", holder=lease.holder)
    owner = asyncio.current_task()
    assert owner is not None, "this runs in a task"
    renewal = asyncio.create_task(_renew(api, lease, times, asked), name="lease")
    renewal.add_done_callback(lambda task: task.cancelled() or owner.cancel())
    try:
        yield
    except asyncio.CancelledError:
        if not renewal.done():
            raise
        owner.uncancel()
    finally:
        renewal.cancel()
        await asyncio.wait([renewal])
        await _release(api, lease, times)
    if not renewal.cancelled():
        renewal.result()


async def _acquire(api: Api, lease: Lease, times: Times) -> float:
    """When the request that acquired it was sent."""
    seen: _Seen | None = None
    while True:
        asked, before = _now(), seen
        try:
            seen = await _try(api, lease, times, seen)
        except _FAILURES as error:
            log.warning("lease_unreachable", error=str(error))
        else:
            if seen is None:
                return asked
            if before is None or before.holder != seen.holder:
                log.info("lease_awaited", held_by=seen.holder)
        await asyncio.sleep(times.retry)


async def _renew(api: Api, lease: Lease, times: Times, asked: float) -> None:
    """Raises LeaseLost. What counts is when a renewal was sent: others count from when they see it, which is later."""
    try:
        while True:
            async with asyncio.timeout_at(asked + times.renew):
                asked = await _renew_once(api, lease, times)
    except TimeoutError:
        raise LeaseLost(f"the lease could not be renewed for {times.renew:.0f} s") from None


async def _renew_once(api: Api, lease: Lease, times: Times) -> float:
    while True:
        await asyncio.sleep(times.retry)
        asked = _now()
        try:
            other = await _try(api, lease, times, None)
        except _FAILURES as error:
            log.warning("lease_not_renewed", error=str(error))
        else:
            if other is None:
                return asked
            raise LeaseLost("another operator took the lease")


async def _release(api: Api, lease: Lease, times: Times) -> None:
    with suppress(*_FAILURES):
        await _try(api, replace(lease, holder=""), times, None, held_by=lease.holder)


async def _try(api: Api, lease: Lease, times: Times, seen: _Seen | None, held_by: str | None = None) -> _Seen | None:
    """Writes the lease if it is ours, free or run out; None when that is done, else what was seen of it."""
    async with asyncio.timeout(times.request):
        found = await api.find("Lease", lease.namespace, lease.name)
        if found is None:
            await api.create(_manifest(lease, times))
            return None
        version, holder = found["metadata"]["resourceVersion"], found.get("spec", {}).get("holderIdentity") or ""
        if holder not in ("", held_by or lease.holder):
            if seen is None or seen.version != version:
                return _Seen(version, _now(), holder)
            if _now() - seen.moment < times.duration:
                return seen
        # With the version, so that of two who try one fails.
        patch = _manifest(lease, times)
        patch["metadata"]["resourceVersion"] = version
        await api.merge("Lease", lease.namespace, lease.name, patch)
        return None


def _manifest(lease: Lease, times: Times) -> Json:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": lease.name, "namespace": lease.namespace},
        "spec": {
            "holderIdentity": lease.holder,
            "leaseDurationSeconds": math.ceil(times.duration),
            "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        },
    }


def _now() -> float:
    return asyncio.get_running_loop().time()
