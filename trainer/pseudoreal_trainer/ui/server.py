"""The server of `pseudoreal ui`: pages, their files, and a stream of changes for each page that is open.

A stream sends what has changed since the content that its page has, at most once in `_LEAST_SECONDS`: a page that is
slow gets fewer, larger changes, never a queue of them. A browser that takes none for `SEND_SECONDS` is cut off.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, ClassVar
from weakref import WeakSet, WeakValueDictionary

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pseudoreal_trainer.ui import html
from pseudoreal_trainer.ui.access import Guard
from pseudoreal_trainer.ui.channels import Channel, Channels, TooManyChannels
from pseudoreal_trainer.ui.html import Content
from pseudoreal_trainer.ui.view import Source

MOST_STREAMS = 48
"""Most pages that are open at a time."""
SEND_SECONDS = 15.0
_LEAST_SECONDS = 0.5
"""Least seconds between two changes of a stream."""
_PING_SECONDS = 2.0
"""Seconds without a change after which a stream says whether the content is still read."""
_FIRST_SECONDS = 8.0
"""Most seconds that a page waits for its first content."""
_REQUEST_SECONDS = 20.0
"""Seconds in which a connection must have sent its first request."""
_MOST_CONNECTIONS = 150

log = structlog.get_logger()


class Pages:
    """Answers to requests that `Guard` has let through."""

    def __init__(self, source: Source, channels: Channels | None = None) -> None:
        self._source, self._channels = source, channels or Channels()
        self._streams: WeakSet[_Stream] = WeakSet()
        self._ending = asyncio.Event()

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self._list),
                Route("/job/{id:path}", self._job),
                Route("/events/list", self._list_events),
                Route("/events/job/{id:path}", self._job_events),
                Route("/assets/{name}", _asset),
            ],
            exception_handlers={404: _not_found, TooManyChannels: _too_many, Exception: _defect},
        )

    async def _list(self, _: Request) -> Response:
        channel, labels = self._listing(), self._source.labels
        with _watched(channel):
            content = await _first_content(channel)
        return HTMLResponse(html.list_page(content or Content(labels.title, {"notices": _reading()}), labels))

    async def _job(self, request: Request) -> Response:
        channel = await self._channel_of(request)
        if channel is None:
            return await _not_found(request, None)
        with _watched(channel):
            content = await _first_content(channel)
        if content is None:
            sentence = channel.trouble or "The first read takes long. Load the page again."
            return HTMLResponse(html.message_page("Nothing is known yet", sentence), 503, {"Retry-After": "5"})
        return HTMLResponse(html.job_page(content, request.path_params["id"]))

    async def _list_events(self, request: Request) -> Response:
        return self._stream(request, self._listing())

    async def _job_events(self, request: Request) -> Response:
        channel = await self._channel_of(request)
        return await _not_found(request, None) if channel is None else self._stream(request, channel)

    def _listing(self) -> Channel:
        labels = self._source.labels
        return self._channels.find("list") or self._channels.open(
            "list", self._source.listing(), lambda listing: html.list_content(listing, labels)
        )

    async def _channel_of(self, request: Request) -> Channel | None:
        """Return the channel of the job in the request's path; None: the list has no such job."""
        id = request.path_params["id"]
        if (found := self._channels.find(f"job/{id}")) is not None:
            return found
        feed = self._source.job(id)
        if feed is None:
            # A page that was open before this program started: the list has not been read yet.
            listing = self._listing()
            with _watched(listing):
                await _first_content(listing)
            feed = self._source.job(id)
        return None if feed is None else self._channels.open(f"job/{id}", feed, html.job_content)

    def _stream(self, request: Request, channel: Channel) -> Response:
        if len(self._streams) >= MOST_STREAMS:
            return PlainTextResponse("too many pages are open", 503, {"Retry-After": "5"})
        stream = _Stream(channel, request.query_params.get("have", ""), self._ending)
        self._streams.add(stream)
        return stream

    def end_streams(self) -> None:
        self._ending.set()

    def close(self) -> None:
        self._channels.close()


class _watched:
    """Context in which somebody watches a channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __enter__(self) -> None:
        self._channel.enter()

    def __exit__(self, *_: object) -> None:
        self._channel.leave()


async def _first_content(channel: Channel) -> Content | None:
    """Return the newest content; None if the first read fails, or takes longer than `_FIRST_SECONDS`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_SECONDS):
            while channel.content is None and not channel.error:
                await channel.next_change().wait()
    return channel.content


def _reading() -> str:
    return "<p>The list is being read.</p>"


class _Stream(Response):
    """Server-sent events: `change` with the parts that have changed, `silent` with a sentence while the content cannot
    be read, `alive` when it can again."""

    media_type = "text/event-stream"

    def __init__(self, channel: Channel, have: str, ending: asyncio.Event) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._channel, self._have, self._ending = channel, have, ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: dict[str, Any]) -> None:
            async with asyncio.timeout(SEND_SECONDS):
                await send(message)

        async def send_events() -> None:
            await send_in_time({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events():
                body = event.encode(errors="replace")
                await send_in_time({"type": "http.response.body", "body": body, "more_body": True})

        tasks = [asyncio.ensure_future(each) for each in (send_events(), _disconnected(receive), self._ending.wait())]
        with _watched(self._channel):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            sent, *_ = await asyncio.gather(*tasks, return_exceptions=True)
        if self._ending.is_set():
            with suppress(TimeoutError):
                await send_in_time({"type": "http.response.body", "body": b""})
        if isinstance(sent, TimeoutError):
            _cut_off(scope)
        elif isinstance(sent, Exception):
            raise sent

    async def _events(self) -> AsyncIterator[str]:
        channel, trouble = self._channel, ""
        newest = channel.content
        sent = newest if newest is not None and newest.digest == self._have else None
        # Something at once, so that the browser knows that the stream is open.
        yield ": open\n\n"
        while True:
            change = channel.next_change()
            now = channel.content
            if now is not None and (sent is None or now.digest != sent.digest):
                yield f"event: change\ndata: {html.changes(sent, now)}\n\n"
                sent = now
            if channel.trouble != trouble:
                trouble = channel.trouble
                yield f"event: silent\ndata: {_one_line(trouble)}\n\n" if trouble else "event: alive\ndata: 1\n\n"
            if channel.content is sent:
                try:
                    async with asyncio.timeout(_PING_SECONDS):
                        await change.wait()
                except TimeoutError:
                    yield ": alive\n\n"
                    continue
            await asyncio.sleep(_LEAST_SECONDS)


def _one_line(text: str) -> str:
    return " ".join(text.split())


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    text = html.assets().get(name)
    if text is None:
        return await _not_found(request, None)
    return Response(text, media_type="text/css" if name.endswith(".css") else "text/javascript")


async def _not_found(_: Request, __: object) -> Response:
    return HTMLResponse(html.message_page("There is no such page", "The job may have been deleted or removed."), 404)


async def _too_many(_: Request, __: object) -> Response:
    sentence = "As many jobs are open as this program follows at a time. Close pages, and load this one again."
    return HTMLResponse(html.message_page("Too many pages", sentence), 503, {"Retry-After": "30"})


async def _defect(_: Request, error: Exception) -> Response:
    log.error("request_failed", exc_info=error)
    return HTMLResponse(html.message_page("The page cannot be made", "The program's own output has more."), 500)


class _Protocol(H11Protocol):
    """Connection with a limit on the time until its first request, and one that a stream can cut off."""

    open: ClassVar[WeakValueDictionary[tuple[str, int], "_Protocol"]] = WeakValueDictionary()
    """Address of the browser's end -> connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None:
            self.open[self.client] = self
        self.loop.call_later(_REQUEST_SECONDS, self._close_unused)

    def _close_unused(self) -> None:
        if self.scope is None:
            self.transport.close()

    def abort(self) -> None:
        """Close the connection, with what it has not sent: `close` would wait for the browser to take that."""
        self.transport.abort()


def _cut_off(scope: Scope) -> None:
    protocol = _Protocol.open.get(tuple(scope.get("client") or ()))
    if protocol is not None:
        protocol.abort()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, pages: Pages) -> None:
        super().__init__(config)
        self._pages = pages

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Streams have no end of their own.
        self._pages.end_streams()
        await super().shutdown(sockets)


class LiveServer:
    """Serves a source at a socket that listens on a loopback address."""

    def __init__(self, source: Source, listener: socket.socket, token: str) -> None:
        self._listener = listener
        self._pages = Pages(source)
        guard = Guard(self._pages.app, token, listener.getsockname()[1])
        self._server = _Server(_config_of(guard), self._pages)

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM, or `stop`."""
        try:
            asyncio.run(self._server.serve(sockets=[self._listener]))
        finally:
            self._pages.close()

    def stop(self) -> None:
        """Make `run` return; any thread may call it."""
        self._server.should_exit = True


def _config_of(app: Guard) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_Protocol,
        loop="asyncio",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        # It says nothing that a user could act on; `_defect` writes the rest.
        log_level="critical",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MOST_CONNECTIONS,
        h11_max_incomplete_event_size=1 << 15,
        timeout_graceful_shutdown=1,
    )
