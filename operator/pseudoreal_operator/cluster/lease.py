"""One operator at a time: a Lease that is held while the operator runs, by the rules of client-go.

A Deployment that recreates its pod may still leave two of them for a while, when a node is cut off.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import structlog
from aiohttp import ClientError
from kubernetes.aio.client import ApiException

from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.metrics.registry import LEASE_AGE
from pseudoreal_operator.settings import Lease

Json = dict[str, Any]

_FAILURES = (ApiException, ClientError, OSError)

log = structlog.get_logger()


# Twice what client-go has. A busy machine needs no more than that (sixteen busy loops on two cores: renewals stay two
# seconds apart); the rest is for an API server that is started anew, after which the operator need not be. Who ends in
# order hands over at once.
DURATION_SECONDS = 30.0
"""Seconds without a renewal after which another operator may take the lease."""
_RENEW_SECONDS = 20.0
"""Seconds without a renewal of its own after which an operator ends itself; it has the rest of the duration to do
so."""
_REQUEST_SECONDS = 5.0
_RETRY_SECONDS = 2.0


@dataclass(frozen=True)
class _Seen:
    """A version of the lease, and when it was first seen by this machine's clock: clocks of other machines are not
    compared."""

    version: str
    moment: float
    holder: str


class LeaseLost(Exception):
    """Another operator holds the lease, or may hold it by now."""


@asynccontextmanager
async def keep_lease(api: Api, lease: Lease) -> AsyncIterator[None]:
    """Waits until the lease is free, and holds it while the context lasts. Raises LeaseLost, having cancelled what runs
    inside."""
    asked = await _acquire(api, lease)
    log.info("lease_acquired", holder=lease.holder)
    owner = asyncio.current_task()
    assert owner is not None, "this runs in a task"
    renewal = asyncio.create_task(_renew(api, lease, asked), name="lease")
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
        await _release(api, lease)
    if not renewal.cancelled():
        renewal.result()


async def _acquire(api: Api, lease: Lease) -> float:
    """The moment at which the request that acquired the lease was sent."""
    seen: _Seen | None = None
    while True:
        asked, before = _now(), seen
        try:
            seen = await _try(api, lease, seen)
        except _FAILURES as error:
            log.warning("lease_unreachable", error=str(error))
        else:
            if seen is None:
                return asked
            if before is None or before.holder != seen.holder:
                log.info("lease_awaited", held_by=seen.holder)
        await asyncio.sleep(_RETRY_SECONDS)


async def _renew(api: Api, lease: Lease, asked: float) -> None:
    """Renews the lease again and again. Raises LeaseLost. What counts is when a renewal was sent: others count from
    when they see it, which is later."""
    try:
        while True:
            LEASE_AGE.set_function(partial(_seconds_since, asked))
            async with asyncio.timeout_at(asked + _RENEW_SECONDS):
                asked = await _renew_once(api, lease)
    except TimeoutError:
        raise LeaseLost(f"the lease could not be renewed for {_RENEW_SECONDS:.0f} s") from None


async def _renew_once(api: Api, lease: Lease) -> float:
    while True:
        await asyncio.sleep(_RETRY_SECONDS)
        asked = _now()
        try:
            other = await _try(api, lease, None)
        except _FAILURES as error:
            log.warning("lease_not_renewed", error=str(error))
        else:
            if other is None:
                return asked
            raise LeaseLost("another operator took the lease")


async def _release(api: Api, lease: Lease) -> None:
    with suppress(*_FAILURES):
        await _try(api, replace(lease, holder=""), None, held_by=lease.holder)


async def _try(api: Api, lease: Lease, seen: _Seen | None, held_by: str | None = None) -> _Seen | None:
    """Writes the lease if it is ours, free or run out; None when that is done, else what was seen of it."""
    async with asyncio.timeout(_REQUEST_SECONDS):
        found = await api.find("Lease", lease.namespace, lease.name)
        if found is None:
            await api.create(_manifest(lease, {}))
            return None
        version, spec = found["metadata"]["resourceVersion"], found.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", held_by or lease.holder):
            if seen is None or seen.version != version:
                return _Seen(version, _now(), holder)
            if _now() - seen.moment < DURATION_SECONDS:
                return seen
        # With the version, so that of two who try one fails.
        patch = _manifest(lease, spec)
        patch["metadata"]["resourceVersion"] = version
        await api.merge("Lease", lease.namespace, lease.name, patch)
        return None


def _manifest(lease: Lease, before: Json) -> Json:
    """The Lease to write. `before`: what it said; empty for a new one."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {
        "holderIdentity": lease.holder,
        "leaseDurationSeconds": math.ceil(DURATION_SECONDS),
        "renewTime": now,
    }
    if lease.holder and before.get("holderIdentity") != lease.holder:
        spec |= {"acquireTime": now, "leaseTransitions": before.get("leaseTransitions", 0) + 1 if before else 0}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": lease.name, "namespace": lease.namespace},
        "spec": spec,
    }


def _seconds_since(moment: float) -> float:
    """Whoever reads metrics may be outside of the loop, whose clock this is."""
    return time.monotonic() - moment


def _now() -> float:
    return asyncio.get_running_loop().time()
