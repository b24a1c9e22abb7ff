"""Reverse proxy between the operator and the API server, for recording every request and injecting faults."""

import asyncio
import json
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import yaml
from aiohttp import web
from kubernetes import client, config
from pseudoreal_api.base import GROUP, PLURAL, VERSION

from tests.integration.operator.chaos.support.faults import Fault, Kind, Target

Json = dict[str, Any]

DELAY_SECONDS = 2.0
_CODES = {
    Kind.ANSWER_404: (404, "NotFound"),
    Kind.ANSWER_409: (409, "Conflict"),
    Kind.ANSWER_410: (410, "Expired"),
    Kind.ANSWER_429: (429, "TooManyRequests"),
    Kind.ANSWER_500: (500, "InternalError"),
    Kind.REFUSE_TEXTS: (400, "BadRequest"),
    Kind.ERROR_410: (410, "Expired"),
    Kind.ERROR_500: (500, "InternalError"),
}
_ERRORS = (Kind.ERROR_410, Kind.ERROR_500)
_DISCOVERY = f"/apis/{GROUP}/{VERSION}"
# An event of a watch is one line.
_LINE_BYTES = 2**21


@dataclass
class Exchange:
    """A request, and the API server's answer; None for the answer if the request was not forwarded."""

    method: str
    path: str
    is_watch: bool
    status: int | None = None
    created: Json | None = None

    def targets(self) -> tuple[Target, ...]:
        if self.is_watch:
            return (Target.WATCH,)
        if self.method == "GET":
            return (Target.READ, Target.DISCOVERY) if self.path == _DISCOVERY else (Target.READ,)
        if self.path.endswith("/events"):
            return (Target.WRITE, Target.NEWS)
        if PLURAL in self.path:
            return (Target.WRITE, Target.STATUS) if self.path.endswith("/status") else (Target.WRITE,)
        # Renewals of the Lease follow the clock, and do not write to the job's objects.
        return (Target.WRITE,) if "/leases/" in self.path else (Target.WRITE, Target.CHILD)

    def __str__(self) -> str:
        return f"{'WATCH' if self.is_watch else self.method} {self.path}"


@dataclass
class Proxy:
    """Serves on loopback inside its context. `kill` kills the operator; `struck` is the target of the last injected
    fault."""

    upstream: client.Configuration
    faults: tuple[Fault, ...] = ()
    kill: Callable[[], None] = lambda: None
    struck: str = ""
    exchanges: list[Exchange] = field(default_factory=list)
    counts: Counter[Target] = field(default_factory=Counter)
    refuses_texts: bool = False
    """Whether every status with a text is refused."""
    holds: str = ""
    """Suffix of the paths of read requests with answers withheld until `release`; empty: none."""
    holding: int = 0
    """Number of withheld answers."""
    is_away: bool = False
    """Whether no request is answered; existing watches go on."""

    def __enter__(self) -> Self:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=[self._run()])
        self._thread.start()
        assert self._ready.wait(60), "the proxy starts"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def inject(self, fault: Fault) -> None:
        """Replace the faults while the proxy is serving."""
        self.struck, self.faults = "", (fault,)

    def release(self) -> None:
        self.holds = ""
        self._loop.call_soon_threadsafe(self._released.set)

    def writes(self, begin: int = 0) -> list[str]:
        """Return the write requests, from the exchange with index `begin` on."""
        return [str(exchange) for exchange in self.exchanges[begin:] if exchange.method != "GET"]

    def write_kubeconfig(self, path: Path) -> Path:
        named = {"name": "proxy"}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [named | {"cluster": {"server": self._url}}],
            "users": [named | {"user": {}}],
            "contexts": [named | {"context": {"cluster": "proxy", "user": "proxy"}}],
            "current-context": "proxy",
        }
        path.write_text(yaml.safe_dump(content))
        return path

    async def _run(self) -> None:
        self._loop, self._end, self._released = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        app = web.Application(client_max_size=_LINE_BYTES)
        app.router.add_route("*", "/{path:.*}", self._serve)
        # At the end, requests that hang are cut off.
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._url = "http://{}:{}".format(*runner.addresses[0])
        async with self._connect() as self._session:
            self._ready.set()
            await self._end.wait()
            await runner.cleanup()

    def _connect(self) -> aiohttp.ClientSession:
        context = ssl.create_default_context(cafile=self.upstream.ssl_ca_cert)
        assert self.upstream.cert_file is not None
        context.load_cert_chain(self.upstream.cert_file, self.upstream.key_file)
        return aiohttp.ClientSession(
            self.upstream.host,
            connector=aiohttp.TCPConnector(ssl=context, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_LINE_BYTES,
        )

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        exchange = Exchange(request.method, request.path, request.query.get("watch") == "true")
        self.exchanges.append(exchange)
        if self.is_away:
            return _cut_off(request)
        kind = self._due(str(exchange), *exchange.targets())
        if Target.STATUS in exchange.targets():
            self.refuses_texts |= kind is Kind.REFUSE_TEXTS
            kind = None if kind is Kind.REFUSE_TEXTS else kind
            if self.refuses_texts and _has_texts(await request.json()):
                kind = Kind.REFUSE_TEXTS
        if kind in _CODES:
            return _refusal(kind)
        if not await self._reaches_the_server(kind):
            return _cut_off(request)
        answer = await self._forward(request, exchange)
        if self.holds and exchange.targets() == (Target.READ,) and exchange.path.endswith(self.holds):
            self.holding += 1
            await self._released.wait()
        if kind is Kind.DUPLICATE:
            answer = await self._forward(request, exchange)
        if kind is Kind.KILL_AFTER:
            self.kill()
        return _cut_off(request) if kind in (Kind.DROP_ANSWER, Kind.KILL_AFTER) else answer

    def _due(self, what: str, *targets: Target) -> Kind | None:
        """Count the targets, and return the fault due now, if any."""
        self.counts.update(targets)
        due = {(target, self.counts[target]) for target in targets}
        fault = next((fault for fault in self.faults if (fault.target, fault.number) in due), None)
        if fault is None:
            return None
        self.struck = what
        return fault.kind

    async def _reaches_the_server(self, kind: Kind | None) -> bool:
        if kind is Kind.KILL_BEFORE:
            self.kill()
        if kind is Kind.DELAY:
            await asyncio.sleep(DELAY_SECONDS)
        if kind is Kind.HANG:
            await asyncio.Event().wait()
        return kind not in (Kind.KILL_BEFORE, Kind.DROP_REQUEST)

    async def _forward(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in ("Accept", "Content-Type") if name in request.headers}
        body = await request.read() or None
        async with self._session.request(request.method, request.rel_url, headers=headers, data=body) as upstream:
            exchange.status = upstream.status
            kind = {"Content-Type": upstream.headers.get("Content-Type", "text/plain")}
            if exchange.is_watch:
                answer = web.StreamResponse(status=upstream.status, headers=kind)
                return await self._stream(upstream, request, exchange, answer)
            data = await upstream.read()
        if upstream.status == 201 and "dryRun" not in request.rel_url.query:
            exchange.created = json.loads(data)
        return web.Response(status=upstream.status, body=data, headers=kind)

    async def _stream(
        self, upstream: aiohttp.ClientResponse, request: web.Request, exchange: Exchange, answer: web.StreamResponse
    ) -> web.StreamResponse:
        await answer.prepare(request)
        async for line in upstream.content:
            # The operator was killed: only the watches of the next operator count.
            if request.transport is None or request.transport.is_closing():
                break
            whose = Target.JOB_CHANGE if PLURAL in exchange.path else Target.CHILD_CHANGE
            kind = self._due(f"{exchange}: {_described(line)}", Target.CHANGE, whose)
            if kind is Kind.CUT:
                await answer.write(line[: len(line) // 2])
                return _cut_off(request)
            if kind in _ERRORS:
                await answer.write(json.dumps({"type": "ERROR", "object": _failure(kind)}).encode() + b"\n")
                break
            await answer.write(line)
        return answer


def upstream_of(kubeconfig: Path) -> client.Configuration:
    configuration = client.Configuration()
    config.load_kube_config(str(kubeconfig), client_configuration=configuration)
    return configuration


def _cut_off(request: web.Request) -> web.StreamResponse:
    if request.transport:
        request.transport.close()
    return web.Response()


def _refusal(kind: Kind) -> web.StreamResponse:
    body = _failure(kind)
    headers = {"Retry-After": "1"} if kind is Kind.ANSWER_429 else {}
    return web.json_response(body, status=body["code"], headers=headers)


def _failure(kind: Kind) -> Json:
    code, reason = _CODES[kind]
    said = {"status": "Failure", "code": code, "reason": reason, "message": f"The proxy says {code}."}
    return {"kind": "Status", "apiVersion": "v1"} | said


def _has_texts(job: Json) -> bool:
    """Return whether the job has texts from others than the operator; the operator replaces a refused text by a
    sentence."""
    messages = [condition["message"] for condition in job["status"]["conditions"]]
    return any("refused the text of this condition" not in message for message in messages)


def _described(line: bytes) -> str:
    event = json.loads(line)
    return f"{event['type']} {event['object']['metadata'].get('name', '')}"
