"""Course of the benchmark: jobs are applied, run without changes, see the operator replaced, and end."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import click
from pseudoreal_api.base import GROUP, PLURAL, VERSION
from pseudoreal_dev.machine.progress import progress

from benchmarks.operator.results import Bulk, Flight, Quiet, StartUp, quantiles
from benchmarks.operator.site import NAMESPACE, Site, usage_of
from tests.support.jobs import good_job
from tests.support.load.audit import (
    between,
    job_name,
    longest_gap,
    per_kind,
    reactions,
)
from tests.support.load.connection import connect
from tests.support.load.simulator import OURS, Simulator
from tests.support.load.usage import busy_seconds

JOBS = f"/apis/{GROUP}/{VERSION}/namespaces/{NAMESPACE}/{PLURAL}"
_AT_ONCE = 16
_SETTLED_SECONDS = 5.0
_LOOKS_PER_SECOND = 0.3
"""Requests per job and second that an operator may make while nothing changes; more requests are a backlog."""
_LEAST_PATIENCE, _PATIENCE_PER_JOB = 300.0, 2.0


class TookTooLong(click.ClickException):
    """An awaited state did not come in time."""


@dataclass(frozen=True)
class Settings:
    jobs: int
    rate: float
    sample: int
    """Jobs that end one by one at that rate."""
    together: int
    """Jobs that end all at once, afterwards; the rest keeps running."""
    quiet_seconds: float


@dataclass
class Course:
    site: Site
    settings: Settings
    _released: dict[str, float] = field(default_factory=dict)

    async def run(self) -> dict[str, Any]:
        """Run the course; return the fields of a Record."""
        names = [job_name(number) for number in range(self.settings.jobs)]
        async with connect(self.site.control_plane.server) as connection:
            self._connection, self._simulator = connection, Simulator(connection, NAMESPACE, OURS)
            async with self._simulator.running():
                self.site.start_operator()
                begun, busy = time.time(), busy_seconds() - self._own()
                flight = await self._fly(names)
                flown = time.time()
                quiet = await self._rest()
                first = usage_of(self.site.operators[-1])
                start_up = await self._replace(names)
                sample, rest = names[: self.settings.sample], names[self.settings.sample :][: self.settings.together]
                await self._end_one_by_one(sample)
                bulk = await self._end_together(rest)
                second = usage_of(self.site.operators[-1])
                # The first operator has ended, so its last known usage is subtracted.
                others = (busy_seconds() - self._own() - first.seconds - busy) / (time.time() - begun)
        seen = self.site.audit.requests()
        wanted = set(sample)
        own = [r for r in seen if r.job in wanted]
        ending = [r for r in own if r.done >= self._released[r.job]]
        asked = [r for r in ending if r.is_for_jobs]
        answers = reactions(own)
        return {
            "flight": flight,
            "quiet": quiet,
            "start_up": start_up,
            "bulk": bulk,
            "requests_per_life": _sum(per_kind(between(seen, begun, flown), len(names)), per_kind(ending, len(sample))),
            "reaction": quantiles(answer.seconds for answer in answers),
            "job_controller": quantiles(answer.job_controller for answer in answers),
            "answers": quantiles(r.done - r.begun for r in asked),
            "complaints": self.site.complaints(),
            "others": round(others, 2),
            "peak_bytes": max(first.peak_bytes, second.peak_bytes),
            "processor_seconds": round(first.seconds + second.seconds, 2),
        }

    async def _fly(self, names: list[str]) -> Flight:
        begun, before = time.time(), self._processor()
        with progress.step(f"{len(names)} jobs are applied and train"):
            await each(names, self._create)
            await self._until(len(names), lambda status: (status.get("replicas") or {}).get("ready") == 1)
        flight = Flight(seconds=round(time.time() - begun, 2), processor_seconds=round(self._processor() - before, 2))
        await self._settle()
        return flight

    async def _create(self, name: str) -> None:
        await self._connection.request("POST", JOBS, good_job(name))

    async def _rest(self) -> Quiet:
        begun, before = time.time(), self._processor()
        with progress.step("nothing changes"):
            await asyncio.sleep(self.settings.quiet_seconds)
        ended, after = time.time(), self._processor()
        seconds, seen = ended - begun, between(self.site.audit.requests(), begun, ended)
        return Quiet(
            seconds=round(seconds, 1),
            for_jobs={kind: round(count / seconds, 3) for kind, count in per_kind(seen, 1).items()},
            lease=round(sum(r.is_of_operator and r.resource == "leases" for r in seen) / seconds, 3),
            processor_share=round((after - before) / seconds, 4),
        )

    async def _replace(self, names: list[str]) -> StartUp:
        """Kill the operator while a standby waits for the Lease."""
        leader, operator = self.site.operators[-1], self.site.start_operator()
        with progress.step("a standby starts"):
            await self._wait("a standby", lambda: operator.lines("lease_awaited") and operator.is_ready())
        begun, before = time.time(), self.site.transitions()
        await asyncio.to_thread(leader.kill)
        with progress.step("the standby takes over"):
            (look,) = await self._wait("the initial list", lambda: operator.lines("initial_list_completed") or None)
        drained, processor = datetime.fromisoformat(look["timestamp"]).timestamp(), self._processor()
        if look["idle_jobs"] != len(names):
            raise TookTooLong(
                f"{look['idle_jobs']} of {len(names)} jobs are idle: there is something to be done at the others"
            )
        seen = self.site.audit.requests()
        acquired = min(r.done for r in seen if r.kind == "patch leases" and r.begun >= begun)
        await self._settle()
        return StartUp(
            lease_seconds=round(acquired - begun, 2),
            drained_seconds=round(drained - begun, 2),
            processor_seconds=round(processor, 2),
            longest_gap=round(longest_gap(seen, acquired, drained), 2),
            lease_lost=len(operator.lines("lease_lost")),
            transitions=self.site.transitions() - before - 1,
        )

    async def _end_one_by_one(self, names: list[str]) -> None:
        with progress.step(f"{len(names)} jobs come to their ends, {self.settings.rate:g} a second"):
            for name in names:
                self._release(name)
                await asyncio.sleep(1 / self.settings.rate)
            await self._until(len(names), _succeeded)

    async def _end_together(self, names: list[str]) -> Bulk:
        begun, before = time.time(), self._processor()
        with progress.step(f"{len(names)} jobs come to their ends together"):
            for name in names:
                self._release(name)
            await self._until(self.settings.sample + len(names), _succeeded)
        seconds, processor = round(time.time() - begun, 2), round(self._processor() - before, 2)
        wanted = set(names)
        answers = reactions(r for r in self.site.audit.requests() if r.job in wanted)
        reaction = quantiles(answer.seconds for answer in answers)
        return Bulk(jobs=len(names), seconds=seconds, processor_seconds=processor, reaction=reaction)

    def _release(self, name: str) -> None:
        self._released[name] = time.time()
        self._simulator.release(name)

    async def _until(self, count: int, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until `holds` is true for the statuses of `count` jobs, with pauses that limit the load on the API
        server."""
        pause, patience = self.settings.jobs / 250, self._patience()
        deadline = time.monotonic() + patience
        while (found := await self._count(holds)) < count:
            if time.monotonic() > deadline:
                raise TookTooLong(f"only {found} of {count} jobs came so far within {patience:.0f} s")
            self._simulator.check()
            await asyncio.sleep(max(0.5, pause))

    async def _count(self, holds: Callable[[dict[str, Any]], bool]) -> int:
        return sum([holds(body.get("status") or {}) async for body in self._connection.each(JOBS)])

    async def _settle(self) -> None:
        """Wait until the operator makes only the requests that it makes while nothing changes."""
        few = _SETTLED_SECONDS * _LOOKS_PER_SECOND * self.settings.jobs

        def settled() -> bool:
            newest = between(self.site.audit.requests(), time.time() - _SETTLED_SECONDS, time.time())
            return sum(r.is_for_jobs for r in newest) <= few

        await asyncio.sleep(_SETTLED_SECONDS)
        await self._wait("the operator to settle", settled)

    async def _wait(self, what: str, probe: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + self._patience()
        while not (found := probe()):
            if time.monotonic() > deadline:
                raise TookTooLong(f"{what} did not come within {self._patience():.0f} s")
            self._simulator.check()
            await asyncio.sleep(0.5)
        return found

    def _patience(self) -> float:
        return _LEAST_PATIENCE + _PATIENCE_PER_JOB * self.settings.jobs

    def _own(self) -> float:
        """Return the processor seconds of this program, the control plane and the running operator."""
        return time.process_time() + self.site.servers_seconds() + self._processor()

    def _processor(self) -> float:
        return usage_of(self.site.operators[-1]).seconds


async def each(names: list[str], work: Callable[[str], Awaitable[None]]) -> None:
    """Run `work` for each name, a few at a time."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(name: str) -> None:
        async with places:
            await work(name)

    await asyncio.gather(*(one(name) for name in names))


def _succeeded(status: dict[str, Any]) -> bool:
    return status.get("state") == "Complete"


def _sum(*kinds: dict[str, float]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for counted in kinds:
        total.update(counted)
    return {kind: round(number, 2) for kind, number in total.most_common()}
