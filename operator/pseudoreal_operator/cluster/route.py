"""The Service of reports leads to one pod by a label: the pod of the leading operator.

All operators are ready, but only the leader can use the pods' reports.
"""

import asyncio
from random import random
from typing import Any

import structlog

from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.cluster.retry import UNAVAILABLE, pause_after
from pseudoreal_operator.settings import Lease

LABEL, LEADS = "pseudoreal.dev/leader", "true"

log = structlog.get_logger()


async def lead_reports_here(api: Api, lease: Lease) -> None:
    """Label the pod of the lease's holder, and remove the label from others; retry until it is done."""
    failures = 0
    while True:
        try:
            return await _label(api, lease)
        except UNAVAILABLE as error:
            failures += 1
            pause = pause_after(error, failures, random()).seconds
            log.warning("reports_not_led_here", error=f"{type(error).__name__}: {error}", again_in=round(pause, 1))
        await asyncio.sleep(pause)


async def _label(api: Api, lease: Lease) -> None:
    others = [body["metadata"]["name"] async for body in api.each("Pod", lease.namespace, f"{LABEL}={LEADS}")]
    # Label this operator's pod first: two labelled pods for a moment are better than none.
    for name, value in [(lease.holder, LEADS), *((name, None) for name in others if name != lease.holder)]:
        labels: dict[str, Any] = {LABEL: value}
        if await api.find("Pod", lease.namespace, name):
            await api.merge("Pod", lease.namespace, name, {"metadata": {"labels": labels}})
    log.info("reports_led_here", pod=lease.holder, instead_of=[name for name in others if name != lease.holder])
