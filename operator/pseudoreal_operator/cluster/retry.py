"""Waits after failures. Pure."""

from dataclasses import dataclass

from aiohttp import ClientError
from kubernetes.aio.client import ApiException

API_ERRORS = (ApiException, ClientError, OSError, TimeoutError)
"""Errors of requests to the API server: it rejects the request (ApiException), does not answer, or cannot be
reached. NotLeading is a ClientError, so a write that the fence has stopped counts, too."""

CONFLICT = 409
_FIRST_SECONDS, _MOST_SECONDS = 1.0, 60.0
_FIRST_AFTER_CONFLICT, _MOST_AFTER_CONFLICT = 0.1, 5.0
"""Seconds to wait after a conflict, first and maximum. The first attempt comes soon, because a conflict only means that
another writer changed the object."""
_MOST_RETRY_AFTER = 600.0


@dataclass(frozen=True)
class Backoff:
    seconds: float
    is_retry_after: bool = False
    """Whether the API server asked for the wait (Retry-After). If True, events do not end the wait early."""


def backoff_after(error: Exception, failures: int, jitter: float) -> Backoff:
    """Return the wait after a failure. `failures`: number of failures in a row, this one included. `jitter`, from 0
    to 1, shortens the wait by up to half, so that requests that failed together are not repeated together."""
    conflict = isinstance(error, ApiException) and error.status == CONFLICT
    first, most = (_FIRST_AFTER_CONFLICT, _MOST_AFTER_CONFLICT) if conflict else (_FIRST_SECONDS, _MOST_SECONDS)
    seconds = min(most, first * 2.0 ** min(failures - 1, 10)) * (1 - jitter / 2)
    requested = _retry_after(error)
    if requested is None:
        return Backoff(seconds)
    return Backoff(max(seconds, min(requested, _MOST_RETRY_AFTER)), is_retry_after=True)


def _retry_after(error: Exception) -> float | None:
    text = str((getattr(error, "headers", None) or {}).get("Retry-After", ""))
    return float(text) if text.isdecimal() else None
