"""Watches that never end: what becomes of the children of all jobs, told as it happens. Nothing of it is kept."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import structlog
from kubernetes.aio.client import ApiException

from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.cluster.retry import UNAVAILABLE, pause_after
from pseudoreal_operator.metrics.registry import LAST_EVENT

Json = dict[str, Any]

_GONE = 410
_PAUSE_SECONDS = 0.1
"""Seconds between two connections."""

log = structlog.get_logger()


@dataclass(frozen=True)
class Watch:
    """Watches the objects of one kind that have a label. `namespace`: None for all."""

    api: Api
    kind: str
    namespace: str | None
    label: str
    tell: Callable[[str, Json], None]
    """Called with the type of each change and the object; it must not raise."""
    missed: Callable[[], None]
    """Called when changes may have been missed: at the start, and when the API server does not know any more what came
    after the last one that was told."""

    async def run(self, begun: asyncio.Event) -> NoReturn:
        """Watches until it is cancelled. Sets `begun` when nothing is missed from then on."""
        version, failures = "", 0
        told = LAST_EVENT.labels(kind=self.kind, namespace=self.namespace or "")
        while True:
            try:
                if not version:
                    version = await self.api.version(self.kind, self.namespace, self.label)
                    self.missed()
                    begun.set()
                    told.set_to_current_time()
                async for change, body in self.api.watch(self.kind, self.namespace, self.label, version):
                    version, failures = body["metadata"]["resourceVersion"], 0
                    told.set_to_current_time()
                    if change != "BOOKMARK":
                        self.tell(change, body)
                pause = _PAUSE_SECONDS
            # An object that was cut off is no JSON.
            except (*UNAVAILABLE, ValueError) as error:
                failures += 1
                version = "" if isinstance(error, ApiException) and error.status == _GONE else version
                pause = pause_after(error, failures, random.random()).seconds
                log.info("watch_ended", kind=self.kind, namespace=self.namespace, error=str(error), again_in=pause)
            await asyncio.sleep(pause)
