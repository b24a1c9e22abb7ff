"""What is asked of kopf: its settings, and the probe of its watches."""

import asyncio
from typing import cast

import kopf
import pytest
from kopf._cogs.structs import references
from pseudoreal_operator.cluster.finalizer import FINALIZER
from pseudoreal_operator.loop.counts import Counts
from pseudoreal_operator.loop.handlers import live_watchers, register
from pseudoreal_operator.loop.kopf_settings import kopf_settings
from pseudoreal_operator.loop.loop import Loop
from pseudoreal_operator.settings import Settings


def test_kopf_neither_posts_events_nor_looks_for_namespaces_and_lists_by_pages() -> None:
    settings = kopf_settings()
    # kopf would take it off itself, but not again when that is refused.
    assert settings.persistence.finalizer != FINALIZER
    assert settings.posting.enabled is False
    assert settings.scanning.disabled is True
    assert settings.peering.standalone is True
    assert settings.watching.chunk_size
    # They become query parameters, and the API server takes integers only.
    assert isinstance(settings.watching.server_timeout, int)
    assert settings.process.ultimate_exiting_timeout
    assert settings.process.ultimate_exiting_timeout < 30


async def test_the_probe_counts_the_watches_and_fails_when_one_is_dead() -> None:
    stop = asyncio.Event()
    names = ("watcher for pseudorealjobs", "watch of Job in None")
    tasks = [asyncio.create_task(stop.wait(), name=name) for name in names]
    await asyncio.sleep(0)
    assert live_watchers(expected=2) == 2
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    with pytest.raises(kopf.PermanentError, match="1 of 2 watches run"):
        live_watchers(expected=2)
    stop.set()
    await asyncio.wait(tasks)


async def test_the_handler_of_kopf_needs_no_finalizer() -> None:
    """It would make kopf write to every job."""
    registry = kopf.OperatorRegistry()
    register(registry, cast(Loop, None), Counts(), Settings("trainer:1", "IfNotPresent", ()))
    jobs = references.Resource("pseudoreal.dev", "v1alpha1", "pseudorealjobs")
    assert registry._watching.has_handlers(resource=jobs)
    assert not registry._spawning.has_handlers(resource=jobs)
    assert not registry._changing.has_handlers(resource=jobs)
