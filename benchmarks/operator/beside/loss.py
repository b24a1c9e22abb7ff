"""Time from the loss of all pods of one job until as many new pods run, under pseudoreal and JobSet."""

import asyncio
import time
from contextlib import ExitStack

from pseudoreal_dev.machine.progress import progress

from benchmarks.operator.beside import measures
from benchmarks.operator.beside.results import Loss
from benchmarks.operator.beside.stacks import Stack
from benchmarks.operator.course import TookTooLong
from benchmarks.operator.site import NAMESPACE, Site, site
from tests.support.load.audit import between, job_name
from tests.support.load.connection import connect
from tests.support.load.simulator import Simulator

_SETTLED_SECONDS = 15.0
"""Seconds between the start of the last pod and the loss of all pods."""
_PATIENCE_SECONDS = 600.0


def measure(stack: Stack, workers: int) -> Loss:
    """Measure one stack alone, on an API server of its own. Raises TookTooLong."""
    with ExitStack() as cleanup, progress.step(f"{stack.title}: {workers} pods are lost"):
        found = cleanup.enter_context(site(measures.policy(stack.users)))
        cleanup.enter_context(stack.running(found))
        return asyncio.run(_lose(stack, workers, found))


async def _lose(stack: Stack, workers: int, found: Site) -> Loss:
    async with connect(found.control_plane.server) as connection:
        simulator = Simulator(connection, NAMESPACE, stack.pods)
        async with simulator.running():
            group, version, plural = stack.jobs.split("/")
            path = f"/apis/{group}/{version}/namespaces/{NAMESPACE}/{plural}"
            await connection.request("POST", path, stack.job(job_name(0), workers))
            await _until_alive(simulator, workers)
            await asyncio.sleep(_SETTLED_SECONDS)
            begun, before = time.time(), found.servers_seconds()
            lost = await simulator.lose()
            injected = time.time()
            await _until_alive(simulator, workers)
            ended, spent = time.time(), found.servers_seconds() - before
    caused = measures.caused(between(found.audit.requests(), begun, ended), stack.users)
    return Loss(
        stack=stack.title,
        workers=lost,
        lost_seconds=round(injected - begun, 2),
        seconds=round(ended - begun, 2),
        requests=len(caused),
        servers_seconds=round(spent, 2),
    )


async def _until_alive(simulator: Simulator, workers: int) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while simulator.alive() < workers:
        if time.monotonic() > deadline:
            raise TookTooLong(f"{simulator.alive()} of {workers} pods ran within {_PATIENCE_SECONDS:.0f} s")
        simulator.check()
        await asyncio.sleep(0.1)
