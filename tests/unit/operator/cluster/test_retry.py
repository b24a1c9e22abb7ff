"""Waiting times after failures."""

import pytest
from aiohttp import ClientError
from kubernetes.aio.client import ApiException
from pseudoreal_operator.cluster.retry import Backoff, backoff_after


def make_error(status: int, retry_after: str | None = None) -> ApiException:
    error = ApiException(status=status)
    error.headers = {} if retry_after is None else {"Retry-After": retry_after}
    return error


@pytest.mark.parametrize(
    "error",
    [make_error(500), ClientError("cut"), TimeoutError(), KeyError("a mistake of ours"), ApiException(status=503)],
)
def test_backoff_doubles_up_to_a_minute(error: Exception) -> None:
    waits = [backoff_after(error, failures, jitter=0).seconds for failures in (1, 2, 3, 7, 1000)]
    assert waits == [1, 2, 4, 60, 60]


def test_jitter_spreads_retries_of_requests_that_failed_together() -> None:
    assert backoff_after(make_error(500), 3, jitter=0.5) == Backoff(3)
    assert backoff_after(make_error(500), 3, jitter=1) == Backoff(2)


def test_backoff_after_a_conflict_starts_short_and_grows() -> None:
    waits = [backoff_after(make_error(409), failures, jitter=0).seconds for failures in (1, 2, 1000)]
    assert waits == [0.1, 0.2, 5]


@pytest.mark.parametrize(
    ("said", "failures", "expected"),
    [
        ("30", 1, Backoff(30, is_retry_after=True)),
        ("3", 6, Backoff(32, is_retry_after=True)),
        ("100000", 1, Backoff(600, is_retry_after=True)),
        ("Fri, 31 Dec 1999 23:59:59 GMT", 1, Backoff(1)),
        ("-1", 1, Backoff(1)),
        (None, 1, Backoff(1)),
    ],
)
def test_retry_after_lengthens_the_backoff_up_to_a_limit(said: str | None, failures: int, expected: Backoff) -> None:
    assert backoff_after(make_error(429, said), failures, jitter=0) == expected
