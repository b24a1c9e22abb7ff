"""Cost for the operator of the reports of a job with very many workers.

A pod reports every 5 s. Here a fifth as many pods report every second: as many reports, within the endpoint's limit of
connections.
"""

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import click
from pseudoreal_api.wire.messages import ProgressReport
from pseudoreal_api.wire.reports import REPORT_AUDIENCE, PodReport, RankReport
from pseudoreal_dev.machine.progress import progress

from benchmarks.operator.beside import measures
from benchmarks.operator.beside.results import Reporting
from benchmarks.operator.beside.stacks import ONE_PHASE
from benchmarks.operator.course import each
from benchmarks.operator.site import NAMESPACE, Site, site, usage_of
from tests.support.load.audit import between, job_name
from tests.support.load.connection import Connection, connect
from tests.support.load.simulator import Simulator
from tests.support.names import OPERATOR
from tests.support.patience import PATIENCE_SECONDS

Json = dict[str, Any]

_PODS_OF_ADDRESS = 100
"""Pods per client address: the endpoint limits the connections from one address in a short time."""
_ACCOUNT = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default/token"


@dataclass
class _Pods:
    """Pods that report every second, each over its own connection."""

    url: str
    trusted: ssl.SSLContext
    answers: Counter[int] = field(default_factory=Counter)
    """Number of answers by HTTP status; 0 means no answer."""
    heard: set[int] = field(default_factory=set)
    """Indices of pods with at least one accepted report."""

    @asynccontextmanager
    async def reporting(self, tokens: list[str]) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._report(index, token)) for index, token in enumerate(tokens)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _report(self, index: int, token: str) -> None:
        address = f"127.0.0.{2 + index // _PODS_OF_ADDRESS}"
        connector = aiohttp.TCPConnector(ssl=self.trusted, limit=1, local_addr=(address, 0))
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            # Spread the reports over the second.
            await asyncio.sleep(index % _PODS_OF_ADDRESS / _PODS_OF_ADDRESS)
            begun = time.monotonic()
            for step in range(10**6):
                await self._send(session, index, step)
                await asyncio.sleep(max(0.0, begun + step + 1 - time.monotonic()))

    async def _send(self, session: aiohttp.ClientSession, index: int, step: int) -> None:
        try:
            async with session.post(self.url, data=_report(index, step).to_json()) as answer:
                self.answers[answer.status] += 1
                if answer.status == 200:
                    self.heard.add(index)
        except (aiohttp.ClientError, OSError):
            self.answers[0] += 1


def _report(index: int, step: int) -> PodReport:
    """Return a pod's report; only the pod of rank 0 includes progress."""
    sign = RankReport(rank=index, activity="computing", seconds=0.1, step=step)
    return PodReport(ranks=[sign], progress=_progress(step) if index == 0 else None)


def _progress(step: int) -> ProgressReport:
    return ProgressReport(
        phase="real",
        step=step,
        total_steps=10**6,
        tokens=step * 1024,
        loss=2.0,
        learning_rate=1e-3,
        tokens_per_second=1024.0,
        seconds=float(step),
        remaining_seconds=100.0,
        global_cursor=step,
    )


async def _measured(found: Site, pods: int, seconds: float) -> Reporting:
    operator = found.start_operator()
    async with connect(found.control_plane.server) as connection:
        simulator = Simulator(connection, NAMESPACE, ONE_PHASE.pods)
        async with simulator.running():
            path = f"/apis/{ONE_PHASE.jobs.rpartition('/')[0]}/namespaces/{NAMESPACE}/{ONE_PHASE.jobs.split('/')[2]}"
            await connection.request("POST", path, _endless(pods))
            await _until("pods that run", lambda: simulator.started == pods)
            tokens = await _tokens(connection)
            url = f"https://127.0.0.1:{operator.report_address.getsockname()[1]}/v1/report"
            speaking = _Pods(url, ssl.create_default_context(cafile=found.tls / "ca.crt"))
            async with speaking.reporting(tokens):
                await _until("a report of each pod", lambda: len(speaking.heard) == pods)
                begun, before, answers = time.time(), usage_of(operator).seconds, speaking.answers.copy()
                await asyncio.sleep(seconds)
                passed, spent = time.time() - begun, usage_of(operator).seconds - before
                told = speaking.answers - answers
    seen = measures.caused(between(found.audit.requests(), begun, begun + passed), [OPERATOR])
    return Reporting(
        pods=pods,
        reports_per_second=round(told[200] / passed, 1),
        refused=sum(count for status, count in told.items() if status != 200),
        processor_share=round(spent / passed, 3),
        writes_per_minute=round(60 * measures.writes(seen) / passed, 1),
        peak_bytes=usage_of(operator).peak_bytes,
    )


def _endless(pods: int) -> Json:
    body = ONE_PHASE.job(job_name(0), pods)
    body["spec"]["phases"][0]["until"] = {"step": 10**6}
    return body


async def _tokens(connection: Connection) -> list[str]:
    """Return a token for each pod, in order of the pods."""
    pods = [pod async for pod in connection.each(f"/api/v1/namespaces/{NAMESPACE}/pods")]
    by_name = {pod["metadata"]["name"]: pod["metadata"] for pod in pods}
    found: dict[str, str] = {}

    async def ask(name: str) -> None:
        bound = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": by_name[name]["uid"]}
        spec = {"audiences": [REPORT_AUDIENCE], "expirationSeconds": 3600, "boundObjectRef": bound}
        answer = await connection.request("POST", _ACCOUNT, {"spec": spec})
        found[name] = answer["status"]["token"]

    await each([*by_name], ask)
    return [found[name] for name in sorted(found, key=lambda name: int(name.rsplit("-", 2)[1]))]


async def _until(what: str, holds: Any) -> None:
    deadline = time.monotonic() + 3 * PATIENCE_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise click.ClickException(f"{what} did not come")
        await asyncio.sleep(0.5)


def measure(pods: int, seconds: float) -> Reporting:
    with site(measures.policy([OPERATOR])) as found, progress.step(f"{pods} pods report every second"):
        return asyncio.run(_measured(found, pods, seconds))
