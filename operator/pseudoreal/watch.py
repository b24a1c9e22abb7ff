"""The statuses of one job, as the operator writes them."""

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal.api import Api, Lines
from pseudoreal.errors import ClientError, JobDeleted, NotFound, Unreadable
from pseudoreal.observed_job import ObservedJob

Json = dict[str, Any]

_GONE = 410
_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.1, 30.0
PATIENCE_SECONDS = 600.0
"""Seconds without an answer of the API server after which a watch gives up."""


class Watch(Iterator[PseudoRealJobStatus]):
    """Statuses of a job: the present one, then each that differs from the one before, until the job has ended.

    A lost connection is made again, from the version of the last change. Raises ClientError: at once for the first
    request, and for a refusal; JobDeleted when the job is gone. `close` may be called from any thread.
    """

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api, self._namespace, self._name = api, namespace, name
        self._lines: Lines | None = None
        self._closed = threading.Event()
        self._statuses = self._changed_statuses()

    def __next__(self) -> PseudoRealJobStatus:
        return next(self._statuses)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration; any thread may call it."""
        self._closed.set()
        if (lines := self._lines) is not None:
            lines.close()

    def _changed_statuses(self) -> Iterator[PseudoRealJobStatus]:
        before: PseudoRealJobStatus | None = None
        for body in self._bodies():
            job = ObservedJob(body)
            if (reason := job.unreadable) is not None:
                raise Unreadable(f"the status of {self._name} in namespace {self._namespace} cannot be read: {reason}")
            if job.status != before:
                yield job.status
            before = job.status
            if job.is_over:
                return

    def _bodies(self) -> Iterator[Json]:
        """Yield the job, and the job after each change."""
        body = self._api.job(self._namespace, self._name)
        uid, version = body["metadata"]["uid"], body["metadata"]["resourceVersion"]
        failures, answered = 0, time.monotonic()
        yield body
        while not self._closed.is_set():
            try:
                if not version:
                    # Changes may have been missed: begin again with the job as it is now.
                    body = self._job_again()
                    self._check_same(body, uid)
                    version = body["metadata"]["resourceVersion"]
                    yield body
                for kind, body in self._changes(version):
                    version, failures, answered = body["metadata"]["resourceVersion"], 0, time.monotonic()
                    if kind == "BOOKMARK":
                        continue
                    self._check_same(body, uid)
                    if kind == "DELETED":
                        raise self._deleted()
                    yield body
                failures, answered = 0, time.monotonic()
            except ClientError as error:
                is_gone = error.status == _GONE
                if self._closed.is_set():
                    return
                if not (is_gone or error.may_pass) or time.monotonic() - answered > PATIENCE_SECONDS:
                    raise
                version, failures = "" if is_gone else version, failures + 1
            self._closed.wait(_pause(failures))

    def _changes(self, version: str) -> Iterator[tuple[str, Json]]:
        """Yield type and object of each change after `version`, until the API server ends the watch."""
        self._lines = lines = self._api.watch_job(self._namespace, self._name, version)
        if self._closed.is_set():  # closed while the request was sent, when there was nothing to close yet
            lines.close()
        for line in lines:
            yield self._api.event_of(line, self._namespace, self._name)

    def _job_again(self) -> Json:
        try:
            return self._api.job(self._namespace, self._name)
        except NotFound as error:
            raise self._deleted() from error

    def _check_same(self, body: Json, uid: str) -> None:
        """Raise JobDeleted if the object is another job of the same name."""
        if body["metadata"].get("uid") != uid:
            raise self._deleted()

    def _deleted(self) -> JobDeleted:
        return JobDeleted(f"job {self._name} in namespace {self._namespace} was deleted while it was watched")


def _pause(failures: int) -> float:
    """Return the seconds until the next request. They are drawn, so that many clients do not come back at once."""
    most = min(_LEAST_PAUSE_SECONDS * 2.0**failures, _MOST_PAUSE_SECONDS)
    return random.uniform(most / 2, most)
