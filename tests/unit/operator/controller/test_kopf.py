"""What is asked of kopf: its settings, and the probe of its watches."""

import asyncio

import kopf
import pytest
from pseudoreal_operator.controller.handlers import live_watchers
from pseudoreal_operator.controller.kopf_settings import kopf_settings


def test_kopf_neither_posts_events_nor_looks_for_namespaces() -> None:
    settings = kopf_settings()
    assert settings.persistence.finalizer == "pseudoreal.dev/cleanup"
    assert settings.posting.enabled is False
    assert settings.scanning.disabled is True
    assert settings.peering.standalone is True
    # They become query parameters, and the API server takes integers only.
    assert isinstance(settings.watching.server_timeout, int)
    assert settings.process.ultimate_exiting_timeout
    assert settings.process.ultimate_exiting_timeout < 30


async def test_the_probe_counts_the_watches_and_fails_when_one_is_dead() -> None:
    stop = asyncio.Event()
    tasks = [asyncio.create_task(stop.wait(), name=f"watcher for {kind}") for kind in ("jobs", "prj")]
    await asyncio.sleep(0)
    assert live_watchers(expected=2) == 2
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    with pytest.raises(kopf.PermanentError, match="1 of 2 watches run"):
        live_watchers(expected=2)
    stop.set()
    await asyncio.wait(tasks)
