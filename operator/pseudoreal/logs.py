"""Logs of the pods of a job, line by line."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import NamedTuple

from pseudoreal_operator.observe.view import Pod
from pseudoreal_operator.untrusted_text import sanitize

from pseudoreal.api import MOST_LINE_BYTES, Api, LogLines
from pseudoreal.errors import ClientError
from pseudoreal.observed_job import ObservedJob
from pseudoreal.pods import has_started, line_prefix, not_started, pods_to_read

_POLL_SECONDS = 2.0
"""Seconds between two looks for pods that have started."""
_MOST_WAITING = 1000
"""Maximum number of lines that wait for the caller; the pods' logs are read no faster."""


class LogLine(NamedTuple):
    prefix: str
    """Phase, execution and ranks, for instance "[real e1 rank 0-1] "; empty if the caller asked for one rank."""
    text: str
    """The line, with a visible sign for each control character."""
    pod: str


@dataclass(frozen=True)
class Selection:
    """The logs to read."""

    rank: int | None = None
    """Only the pod of this rank; None: all pods."""
    previous: bool = False
    """The execution before the newest; else the newest."""
    follow: bool = False
    """Until the job ends, through all its executions."""
    tail: int | None = None
    """Number of newest lines of each pod; None: all."""


class Logs(Iterator[LogLine]):
    """Lines of the pods' logs: one pod after the other, or, if they are followed, as they arrive.

    `warn` receives a sentence about each pod whose log cannot be read; the first failure is raised after the last line.
    `close` may be called from any thread.
    """

    def __init__(self, api: Api, namespace: str, name: str, wanted: Selection, warn: Callable[[str], None]) -> None:
        self._api, self._namespace, self._name, self._wanted, self._warn = api, namespace, name, wanted, warn
        self._open: set[LogLines] = set()
        self._closed = threading.Event()
        self._failures: list[ClientError] = []
        self._readers: dict[str, threading.Thread] = {}
        """Pod name -> thread that reads the pod's log."""
        self._waiting: Queue[LogLine | None] = Queue(_MOST_WAITING)
        """Lines of followed logs; None wakes the caller."""
        self._lines = self._follow() if wanted.follow else self._read_once()

    def __next__(self) -> LogLine:
        return next(self._lines)

    def __enter__(self) -> "Logs":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration; any thread may call it."""
        self._closed.set()
        for lines in [*self._open]:
            lines.close()
        with suppress(Full):  # then the caller does not wait
            self._waiting.put_nowait(None)

    def _read_once(self) -> Iterator[LogLine]:
        job, pods = self._read_pods(self._job())
        for pod in pods:
            yield from self._read(job, pod)
        if self._failures:
            raise self._failures[0]

    def _follow(self) -> Iterator[LogLine]:
        """Yield the lines of all executions until the job is over and its logs have ended."""
        try:
            while not self._closed.is_set():
                is_over = self._start_readers()
                yield from self._arrived()
                if is_over and not any(thread.is_alive() for thread in self._readers.values()):
                    yield from self._arrived(wait=0)
                    break
        finally:
            self.close()
        if self._failures:
            raise self._failures[0]

    def _arrived(self, wait: float = _POLL_SECONDS) -> Iterator[LogLine]:
        """Yield the lines that arrive within `wait` seconds, and those that have arrived."""
        end = time.monotonic() + wait
        while not self._closed.is_set():
            try:
                line = self._waiting.get(timeout=max(0.0, end - time.monotonic()))
            except Empty:
                return
            if line is not None:
                yield line
            elif not any(thread.is_alive() for thread in self._readers.values()):
                return

    def _start_readers(self) -> bool:
        """Start a thread for each started pod that has none; return whether the job is over, so that no more pods
        come."""
        job = self._job()
        try:
            _, pods = self._read_pods(job)
        except ClientError:
            pods = []
        for pod in filter(has_started, pods):
            if pod.name not in self._readers:
                thread = threading.Thread(target=self._pass_on, args=(job, pod), daemon=True)
                self._readers[pod.name] = thread
                thread.start()
        return job.is_over

    def _job(self) -> ObservedJob:
        return ObservedJob(self._api.job(self._namespace, self._name))

    def _read_pods(self, job: ObservedJob) -> tuple[ObservedJob, list[Pod]]:
        bodies = self._api.each("Pod", job.namespace, job.selector)
        return job, pods_to_read(job, bodies, self._wanted.rank, previous=self._wanted.previous)

    def _pass_on(self, job: ObservedJob, pod: Pod) -> None:
        for line in self._read(job, pod):
            while not self._closed.is_set():
                try:
                    self._waiting.put(line, timeout=1.0)
                    break
                except Full:
                    continue  # until the caller takes lines, or closes

    def _read(self, job: ObservedJob, pod: Pod) -> Iterator[LogLine]:
        if not has_started(pod):
            self._warn(not_started(pod))
            return
        prefix = line_prefix(job, pod) if self._wanted.rank is None else ""
        lines: LogLines | None = None
        try:
            lines = self._api.log(job.namespace, pod.name, follow=self._wanted.follow, tail=self._wanted.tail)
            self._open.add(lines)
            for line in lines:
                if self._closed.is_set():
                    return
                yield LogLine(prefix, sanitize(line, MOST_LINE_BYTES), pod.name)
        except ClientError as error:
            self._failures.append(error)
            self._warn(f"{prefix}{error.message}")
        finally:
            if lines is not None:
                self._open.discard(lines)
                lines.close()
