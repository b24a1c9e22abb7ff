"""Tasks without which the operator does not work. If one ends, the liveness probe fails."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import structlog

log = structlog.get_logger()

_tasks: set[asyncio.Task[Any]] = set()


@asynccontextmanager
async def running(name: str, coroutine: Coroutine[Any, Any, object]) -> AsyncIterator[asyncio.Task[Any]]:
    """Run a task that must not end before the context does; the context cancels it at its end."""
    task = asyncio.create_task(coroutine, name=name)
    watch_over(task)
    try:
        yield task
    finally:
        let_go(task)
        task.cancel()
        await asyncio.wait([task])


def watch_over(task: asyncio.Task[Any]) -> None:
    """Expect the task to run, until `let_go`."""
    _tasks.add(task)
    task.add_done_callback(_tell)


def let_go(task: asyncio.Task[Any]) -> None:
    _tasks.discard(task)


def live_tasks() -> list[str]:
    return sorted(task.get_name() for task in _tasks if not task.done())


def dead_tasks() -> list[str]:
    return sorted(task.get_name() for task in _tasks if task.done())


def _tell(task: asyncio.Task[Any]) -> None:
    if task in _tasks:
        error = None if task.cancelled() else task.exception()
        log.error("task_died", task=task.get_name(), exc_info=error)
    elif not task.cancelled():
        task.exception()  # retrieve the error: it was reported elsewhere, or nobody asks any more
