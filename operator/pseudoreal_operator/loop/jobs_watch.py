"""Watch of jobs by kopf, in its own thread; kopf is restarted whenever it ends.

If kopf ends (by an error in its stream, a 404 while the CRD is replaced, or a bug), the rest of the operator runs on.
kopf's events are processed in the operator's own event loop.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import kopf
import structlog
from pseudoreal_api.base import GROUP, PLURAL, VERSION

from pseudoreal_operator.cluster.kopf_session import Contact
from pseudoreal_operator.cluster.login import register_login
from pseudoreal_operator.cluster.retry import backoff_after
from pseudoreal_operator.loop.loop import Loop
from pseudoreal_operator.metrics.registry import KOPF_RESTARTS
from pseudoreal_operator.settings import Settings

_UNWATCHED_SECONDS = 12.0
"""Seconds of silence after which kopf is restarted if it has never requested jobs: kopf did not find their kind, and
looks for the kind only once."""
_SILENT_SECONDS = 150.0
"""Seconds of silence after which kopf counts as dead: its watch receives something once a minute."""
_CHECK_SECONDS = 1.0
_STOP_SECONDS = 10.0
"""Seconds that kopf has to end after it was cancelled."""
_SUCCESS_SECONDS = 60.0
"""Seconds after which a run of kopf counts as successful, and failures are counted from 1 again."""
_MOST_PAUSE_SECONDS = 10.0
"""Maximum seconds between two runs of kopf, so that a recovered API server is noticed soon."""

log = structlog.get_logger()


class JobsWatch:
    """kopf's watch of the jobs. `run` starts kopf, and restarts it whenever it ends."""

    def __init__(self, loop: Loop, settings: Settings) -> None:
        self._loop, self._settings = loop, settings
        self._contact: Contact | None = None

    @property
    def watched(self) -> int:
        """Number of started watches of PseudoRealJobs: one per namespace, or one for all namespaces."""
        return len(self._contact.watched) if self._contact else 0

    async def run(self) -> NoReturn:
        """Run kopf, and restart it whenever it ends, until cancelled."""
        own, failures = asyncio.get_running_loop(), 0
        missed: Callable[[], object] = partial(own.call_soon_threadsafe, self._loop.job_changes_missed)
        call: Callable[..., object] = own.call_soon_threadsafe
        unreadable = partial(call, self._loop.job_unreadable)
        while True:
            contact = self._contact = Contact(missed, unreadable)
            registry = kopf.OperatorRegistry()
            register_login(registry, contact)
            register_handler(registry, self._loop, own)
            started = time.monotonic()
            error = await _run_until_end(_operator(registry, self._settings), contact)
            self._loop.jobs_unwatched()
            failures = 1 if time.monotonic() - started > _SUCCESS_SECONDS else failures + 1
            pause = min(backoff_after(error, failures, random.random()).seconds, _MOST_PAUSE_SECONDS)
            KOPF_RESTARTS.inc()
            log.warning("kopf_ended", error=f"{type(error).__name__}: {error}", retry_after=round(pause, 1))
            await asyncio.sleep(pause)


def register_handler(registry: kopf.OperatorRegistry, loop: Loop, own: asyncio.AbstractEventLoop) -> None:
    # For event handlers kopf writes nothing to a job: no finalizer, no annotation.
    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_changed(type: str | None, event: Any, **_: Any) -> None:
        # Called in kopf's thread; the state of `loop` belongs to the thread of `own`.
        own.call_soon_threadsafe(loop.job_changed, type, event["object"])


def _operator(registry: kopf.OperatorRegistry, settings: Settings) -> Callable[[], Coroutine[Any, Any, None]]:
    return lambda: kopf.operator(
        registry=registry,
        settings=kopf_settings(),
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=list(settings.namespaces),
    )


class Backoffs:
    """Endless waits in seconds, for kopf's retries while the API server rejects requests or is away."""

    def __iter__(self) -> Iterator[float]:
        waits = iter((0.5, 1.0, 2.0, 3.0, 5.0))
        while True:
            yield next(waits, 8.0) + random.random()


def kopf_settings() -> kopf.OperatorSettings:
    """Return kopf's settings, each with its reason (kopf 1.45.2)."""
    settings = kopf.OperatorSettings()
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    # The operator posts its own events, one for each transition.
    settings.posting.enabled = False
    # Namespaces and kinds are known; scanning for new ones needs permissions on the whole cluster.
    settings.scanning.disabled = True
    settings.peering.standalone = True
    # A connection that a load balancer dropped silently must end at some time. Integers, because they become query
    # parameters.
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    # Seconds after which kopf releases the newest body of a job.
    settings.queueing.idle_timeout = 0.5
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = Backoffs()
    settings.execution.default_backoff = 10
    settings.background.cancellation_polling = 5
    # With a timeout kopf would kill the whole process; here only kopf is restarted.
    settings.process.ultimate_exiting_timeout = None
    return settings


async def _run_until_end(make: Callable[[], Coroutine[Any, Any, None]], contact: Contact) -> Exception:
    """Run kopf until it ends or counts as dead; return the reason. When cancelled, stop kopf."""
    running = _Thread(make)
    ended = asyncio.wrap_future(running.ended)
    try:
        while True:
            done, _ = await asyncio.wait([ended], timeout=_CHECK_SECONDS)
            if done:
                return ended.result()
            if why := find_stall(contact, time.monotonic()):
                return TimeoutError(why)
    finally:
        running.stop()
        # A thread that does not end is abandoned: it cannot be killed.
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await asyncio.shield(ended)


def find_stall(contact: Contact, now: float) -> str | None:
    """Return why kopf is to be restarted although it runs; None if it is healthy."""
    silence = now - contact.last
    if not contact.has_requested_jobs and not contact.pending_requests and silence > _UNWATCHED_SECONDS:
        return f"kopf has not begun to watch {PLURAL}; is the CustomResourceDefinition there?"
    if silence > _SILENT_SECONDS:
        return f"kopf has heard nothing for {silence:.0f} s"
    return None


class _Thread:
    """kopf in a thread with its own event loop. `ended` receives the error with which kopf ends."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.ended: Future[Exception] = Future()
        self._make = make
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        threading.Thread(target=self._run, name="kopf", daemon=True).start()

    def stop(self) -> None:
        with suppress(RuntimeError):  # its loop is closed already
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task:
            self._task.cancel()

    def _run(self) -> None:
        error: Exception = RuntimeError("kopf ended")
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._main())
        except asyncio.CancelledError:
            error = RuntimeError("kopf was stopped")
        except BaseException as found:
            error = found if isinstance(found, Exception) else RuntimeError(repr(found))
        finally:
            with suppress(InvalidStateError):  # the waiting task was cancelled
                self.ended.set_result(error)

    async def _main(self) -> None:
        self._task = asyncio.current_task()
        await self._make()
