"""Tasks without which the operator does not work. If one ends, the liveness probe fails."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import structlog

log = structlog.get_logger()

_tasks: set[asyncio.Task[Any]] = set()


@asynccontextmanager
async def background_task(name: str, coroutine: Coroutine[Any, Any, object]) -> AsyncIterator[asyncio.Task[Any]]:
    """Run a task in this context, and cancel the task at the end. If the task ends earlier, the liveness probe
    fails."""
    task = asyncio.create_task(coroutine, name=name)
    _tasks.add(task)
    task.add_done_callback(_log_early_end)
    try:
        yield task
    finally:
        # Allow the end before the cancellation: an intended end must not fail the probe.
        allow_end(task)
        task.cancel()
        await asyncio.wait([task])


def allow_end(task: asyncio.Task[Any]) -> None:
    """Let the task end from now on; the probe no longer requires it."""
    _tasks.discard(task)


def live_tasks() -> list[str]:
    return sorted(task.get_name() for task in _tasks if not task.done())


def dead_tasks() -> list[str]:
    return sorted(task.get_name() for task in _tasks if task.done())


def _log_early_end(task: asyncio.Task[Any]) -> None:
    if task in _tasks:
        error = None if task.cancelled() else task.exception()
        log.error("task_died", task=task.get_name(), exc_info=error)
    elif not task.cancelled():
        task.exception()  # retrieve the error: it was reported elsewhere, or no caller needs it any more
