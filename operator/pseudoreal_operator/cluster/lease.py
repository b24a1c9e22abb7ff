"""Leader election: the operator that holds the Lease leads, by the rules and the times of client-go.

A holder that cannot renew the Lease stops writing at its deadline. The holder continues after its next renewal, however
late, if no other operator held the Lease in between. So an outage of the API server ends no operator.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from random import random
from typing import Any, Self

import structlog
from aiohttp import ClientError
from kubernetes.aio.client import ApiException

from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.cluster.fence import Fence
from pseudoreal_operator.cluster.retry import API_ERRORS, backoff_after
from pseudoreal_operator.metrics.registry import LEASE_AGE
from pseudoreal_operator.settings import Lease

Json = dict[str, Any]

_FAILURES = (ApiException, ClientError, OSError, ValueError)

log = structlog.get_logger()

DURATION_SECONDS = 15.0
"""Seconds without a renewal after which another operator may take the Lease."""
WRITE_SECONDS = 10.0
"""Seconds after a renewal during which the holder may write. The last writes have the rest of DURATION_SECONDS to
arrive."""
_REQUEST_SECONDS = 3.0
_RETRY_SECONDS = 2.0
_PAUSE_SECONDS = 0.1
"""Seconds between two connections of the watch."""
_MOST_DURATION_SECONDS = 60.0
LEADER_LABEL, IS_LEADER = "pseudoreal.dev/leader", "true"
"""Label of the leader's pod. The Service for reports selects by this label: all operators are ready, but only the
leader can use the pods' reports."""


@dataclass(frozen=True)
class _LeaseVersion:
    """A version of the Lease. `first_seen`: time at which this process first saw the version, by the event loop's
    clock; clocks of other machines are never compared. `term`: number of changes of the holder. `seconds`: time without
    a renewal after which the Lease is free; the value may differ between releases."""

    version: str
    first_seen: float
    holder: str
    term: int
    seconds: float

    @classmethod
    def of(cls, body: Json, before: "Self | None" = None) -> Self:
        version, spec = body["metadata"]["resourceVersion"], body.get("spec") or {}
        if before is not None and before.version == version:
            return before
        seconds = min(float(spec.get("leaseDurationSeconds") or DURATION_SECONDS), _MOST_DURATION_SECONDS)
        term = spec.get("leaseTransitions") or 0
        return cls(version, _now(), spec.get("holderIdentity") or "", term, seconds)

    @property
    def end(self) -> float:
        return self.first_seen + self.seconds


class LeaseLost(Exception):
    """Another operator holds the Lease."""


@asynccontextmanager
async def keep_lease(api: Api, lease: Lease, fence: Fence) -> AsyncIterator[None]:
    """Wait until the Lease is free, and hold it in this context, with the fence open. If another operator takes the
    Lease, cancel the code inside the context and raise LeaseLost."""
    term = await _acquire(api, lease, fence)
    log.info("lease_acquired", holder=lease.holder, term=term)
    owner = asyncio.current_task()
    assert owner is not None, "the context is entered in a task"
    renewal = asyncio.create_task(_renew(api, lease, fence, term), name="lease")
    # The code inside the context does not await the renewal, so the end of the renewal cancels that code.
    renewal.add_done_callback(lambda task: task.cancelled() or owner.cancel())
    try:
        yield
    except asyncio.CancelledError:
        # A renewal that has ended has cancelled this task; its LeaseLost is raised below.
        if not renewal.done():
            raise
        owner.uncancel()
    finally:
        # The renewal ends before the fence is closed: otherwise it could open the fence again.
        renewal.cancel()
        await asyncio.wait([renewal])
        fence.close()
        # Release the Lease after the fence is closed, because another operator may write from then on.
        await _release(api, lease, fence, term)
    if not renewal.cancelled():
        renewal.result()


async def _acquire(api: Api, lease: Lease, fence: Fence) -> int:
    """Wait until the Lease is free, take it, and open the fence; return the term."""
    seen: _LeaseVersion | None = None
    while True:
        requested_at, before = fence.now(), seen
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                found = await _read(api, lease, seen)
                # If someone deleted the Lease, the holder may still be alive and create the Lease again: keep the last
                # version seen.
                seen = found or seen
                if seen is None or seen.holder in ("", lease.holder) or _now() >= seen.end:
                    term = await _take(api, lease, found)
                    fence.open_until(requested_at + WRITE_SECONDS)
                    return term
            if before is None or before.holder != seen.holder:
                log.info("lease_awaited", holder=seen.holder)
            seen = await _wait(api, lease, seen)
        except Exception as error:
            log.warning("lease_request_failed", error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(_RETRY_SECONDS)


async def _wait(api: Api, lease: Lease, seen: _LeaseVersion) -> _LeaseVersion:
    """Wait until the Lease may be free, or its watch ends; return the newest version seen. Raises the errors of the
    watch."""
    with suppress(TimeoutError):
        async with asyncio.timeout_at(seen.end) as limit:
            async for change, body in api.watch("Lease", lease.namespace, "", seen.version, name=lease.name):
                if change not in ("ADDED", "MODIFIED"):
                    continue
                seen = _LeaseVersion.of(body)
                if not seen.holder:
                    break
                limit.reschedule(seen.end)
            else:
                await asyncio.sleep(_PAUSE_SECONDS)
    return seen


async def _renew(api: Api, lease: Lease, fence: Fence, term: int) -> None:
    """Renew the Lease until cancelled. Raises LeaseLost. The fence's deadline counts from the time at which a renewal
    is sent; other operators count from the later time at which they see the renewal."""
    LEASE_AGE.set_function(partial(_seconds_since, time.monotonic()))
    while True:
        await asyncio.sleep(_RETRY_SECONDS)
        requested_at, sent = fence.now(), time.monotonic()
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                term = await _renew_once(api, lease, term)
        except LeaseLost:
            fence.close()
            raise
        # Any error can be ignored: without a renewal the fence closes by itself.
        except Exception as error:
            log.warning("lease_renewal_failed", error=f"{type(error).__name__}: {error}", may_write=fence.is_open)
        else:
            LEASE_AGE.set_function(partial(_seconds_since, sent))
            fence.open_until(requested_at + WRITE_SECONDS)


async def _renew_once(api: Api, lease: Lease, term: int) -> int:
    """Renew the Lease; return its term, which changes only if someone deleted the Lease. Raises LeaseLost if another
    operator holds the Lease or has held it in between."""
    # Read the Lease before each renewal, however late the renewal is. The same holder with the same term proves that no
    # other operator led in between, so everything that this operator knows still holds. The holder alone does not prove
    # it: the term counts how often the holder changed.
    seen = await _read(api, lease, None)
    if seen is not None and (seen.holder != lease.holder or seen.term != term):
        raise LeaseLost("another operator took the lease")
    return await _take(api, lease, seen)


async def _release(api: Api, lease: Lease, fence: Fence, term: int) -> None:
    """Release the Lease, unless a write that was sent may still arrive: then let the Lease expire."""
    if not fence.has_answers_for(DURATION_SECONDS):
        log.info("lease_not_released", expires_in_seconds=DURATION_SECONDS)
        return
    with suppress(*_FAILURES):
        async with asyncio.timeout(_REQUEST_SECONDS):
            seen = await _read(api, lease, None)
            if seen is not None and (seen.holder, seen.term) == (lease.holder, term):
                await _write(api, lease, seen, {"holderIdentity": ""})
                log.info("lease_released")


async def _read(api: Api, lease: Lease, before: _LeaseVersion | None) -> _LeaseVersion | None:
    found = await api.find("Lease", lease.namespace, lease.name)
    return None if found is None else _LeaseVersion.of(found, before)


async def _take(api: Api, lease: Lease, seen: _LeaseVersion | None) -> int:
    """Write this holder into the Lease; return the term."""
    if seen is None:
        await api.create(_manifest(lease) | {"spec": _claim(lease) | {"acquireTime": _time(), "leaseTransitions": 0}})
        return 0
    term, spec = seen.term, _claim(lease)
    if seen.holder != lease.holder:
        term += 1
        spec |= {"acquireTime": _time(), "leaseTransitions": term}
    await _write(api, lease, seen, spec)
    return term


async def _write(api: Api, lease: Lease, seen: _LeaseVersion, spec: Json) -> None:
    # With resourceVersion, so that if two operators write at once, one of them fails.
    patch = _manifest(lease) | {"spec": spec}
    patch["metadata"]["resourceVersion"] = seen.version
    await api.merge("Lease", lease.namespace, lease.name, patch)


async def lead_reports_here(api: Api, lease: Lease) -> None:
    """Label the pod of the lease's holder, and remove the label from others; retry until it is done."""
    failures = 0
    while True:
        try:
            return await _move_label(api, lease)
        except API_ERRORS as error:
            failures += 1
            pause = backoff_after(error, failures, random()).seconds
            log.warning("leader_label_failed", error=f"{type(error).__name__}: {error}", retry_after=round(pause, 1))
        await asyncio.sleep(pause)


async def _move_label(api: Api, lease: Lease) -> None:
    labelled = api.each("Pod", lease.namespace, f"{LEADER_LABEL}={IS_LEADER}")
    others = [body["metadata"]["name"] async for body in labelled]
    # Label this operator's pod first: two labelled pods for a moment are better than none.
    for name, value in [(lease.holder, IS_LEADER), *((name, None) for name in others if name != lease.holder)]:
        labels: dict[str, Any] = {LEADER_LABEL: value}
        if await api.find("Pod", lease.namespace, name):
            await api.merge("Pod", lease.namespace, name, {"metadata": {"labels": labels}})
    log.info("leader_label_set", pod=lease.holder, removed_from=[name for name in others if name != lease.holder])


def _manifest(lease: Lease) -> Json:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": lease.name, "namespace": lease.namespace},
    }


def _claim(lease: Lease) -> Json:
    return {
        "holderIdentity": lease.holder,
        "leaseDurationSeconds": math.ceil(DURATION_SECONDS),
        "renewTime": _time(),
    }


def _time() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _seconds_since(moment: float) -> float:
    """Return the seconds since `moment`, a time of time.monotonic. The event loop's clock would not do: metrics may be
    read outside the loop."""
    return time.monotonic() - moment


def _now() -> float:
    return asyncio.get_running_loop().time()
