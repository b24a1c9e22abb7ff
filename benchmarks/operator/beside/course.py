"""Course of a comparison: jobs are applied, run and end by themselves; then the controllers idle."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from pseudoreal_dev.machine.progress import progress

from benchmarks.operator.beside import measures
from benchmarks.operator.beside.results import Idle, Life
from benchmarks.operator.beside.stacks import Stack
from benchmarks.operator.course import TookTooLong, each
from benchmarks.operator.site import NAMESPACE, Site, site
from tests.support.load.audit import between, job_name
from tests.support.load.connection import Connection, connect
from tests.support.load.simulator import Simulator
from tests.support.load.usage import busy_seconds, usage

_LEAST_PATIENCE, _PATIENCE_PER_POD = 300.0, 2.0
_SETTLED_SECONDS = 15.0
"""Seconds after the last end in which controllers finish their work."""


@dataclass(frozen=True)
class Load:
    jobs: int
    workers: int
    """Pods per phase."""
    idle_seconds: float


def measure(stack: Stack, load: Load) -> Life:
    """Measure one stack alone, on an API server of its own. Raises TookTooLong."""
    with ExitStack() as cleanup, progress.step(f"{stack.title}: {load.jobs} jobs of {load.workers} pods"):
        found = cleanup.enter_context(site(measures.policy(stack.users)))
        processes = cleanup.enter_context(stack.running(found))
        return asyncio.run(_Course(stack, load, found, processes).run())


@dataclass
class _Course:
    stack: Stack
    load: Load
    site: Site
    processes: Sequence[int]
    """Process ids of the controllers."""

    async def run(self) -> Life:
        names = [job_name(number) for number in range(self.load.jobs)]
        async with connect(self.site.control_plane.server) as connection:
            simulator = Simulator(connection, NAMESPACE, self.stack.pods, self.load.workers)
            async with simulator.running():
                begun, controllers, servers = time.time(), self._controllers(), self.site.servers_seconds()
                others = busy_seconds() - controllers - servers - time.process_time()
                await self._apply(connection, simulator, names)
                await self._end(simulator)
                seconds = time.time() - begun
                own = self._controllers() + self.site.servers_seconds() + time.process_time()
                others = busy_seconds() - own - others
                spent = self._controllers() - controllers, self.site.servers_seconds() - servers
                idle = await self._rest()
        seen = self.site.audit.requests()
        last = max(measures.ends(seen).values())
        caused = measures.caused(between(seen, begun, idle_begin(last)), self.stack.users)
        return Life(
            stack=self.stack.title,
            jobs=self.load.jobs,
            workers=self.load.workers,
            seconds=round(last - begun, 2),
            requests=measures.per_job(caused, self.load.jobs),
            writes=round(measures.writes(caused) / self.load.jobs, 2),
            processor_seconds=round(spent[0], 2),
            servers_seconds=round(spent[1], 2),
            peak_bytes=sum(usage(process).peak_bytes for process in self.processes),
            reaction=measures.reactions(seen, self.stack.decides),
            others=round(others / seconds, 2),
            idle=idle,
        )

    async def _apply(self, connection: Connection, simulator: Simulator, names: list[str]) -> None:
        group, version, plural = self.stack.jobs.split("/")
        path = f"/apis/{group}/{version}/namespaces/{NAMESPACE}/{plural}"

        async def create(name: str) -> None:
            simulator.release(name)
            await connection.request("POST", path, self.stack.job(name, self.load.workers))

        await each(names, create)

    async def _end(self, simulator: Simulator) -> None:
        """Wait for the ends of all jobs. They are read from the audit log, without requests to the API server."""
        patience = _LEAST_PATIENCE + _PATIENCE_PER_POD * self.load.jobs * self.load.workers
        deadline = time.monotonic() + patience
        while (ended := len(measures.ends(self.site.audit.requests()))) < self.load.jobs:
            if time.monotonic() > deadline:
                raise TookTooLong(f"{ended} of {self.load.jobs} jobs ended within {patience:.0f} s")
            simulator.check()
            await asyncio.sleep(0.5)

    async def _rest(self) -> Idle:
        await asyncio.sleep(_SETTLED_SECONDS)
        begun, before = time.time(), self._controllers()
        await asyncio.sleep(self.load.idle_seconds)
        seconds, spent = time.time() - begun, self._controllers() - before
        caused = measures.caused(between(self.site.audit.requests(), begun, time.time()), self.stack.users)
        return Idle(
            seconds=round(seconds, 1),
            processor_share=round(spent / seconds, 4),
            requests=len(caused),
            writes=measures.writes(caused),
        )

    def _controllers(self) -> float:
        return sum(usage(process).seconds for process in self.processes)


def idle_begin(last: float) -> float:
    """Return the time from which requests no longer belong to the jobs, given the time when the last job ended."""
    return last + _SETTLED_SECONDS
