"""Concurrent requests of an administrator to the API server."""

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
from pseudoreal_dev.cluster.api import Server

Json = dict[str, Any]

MERGE = "application/merge-patch+json"
_SILENT_SECONDS = 150.0
"""Longest silence of a watch; bookmarks come once a minute."""


class Connection:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def request(
        self, method: str, path: str, body: Json | None = None, content_type: str = "application/json", **query: str
    ) -> Json:
        """Send a request and return the answer. Raises aiohttp.ClientResponseError for an answer without success."""
        headers = {"Content-Type": content_type}
        data = None if body is None else json.dumps(body)
        async with self._session.request(method, path, data=data, headers=headers, params=query) as answer:
            if answer.status >= 400:
                text = await answer.text()
                raise aiohttp.ClientResponseError(
                    answer.request_info, answer.history, status=answer.status, message=text[:500]
                )
            found: Json = await answer.json()
            return found

    async def each(self, path: str) -> AsyncIterator[Json]:
        """Yield all objects, page by page."""
        following: str | None = None
        while following != "":
            page = await self.request("GET", path, **_page(following))
            following = page["metadata"].get("continue") or ""
            for body in page["items"]:
                yield body

    async def watch(self, path: str, selector: str, since: str | None = None) -> AsyncIterator[tuple[str, Json]]:
        """Yield (type, object): first of all existing objects, or of those that have changed after the version `since`,
        then of each change and bookmark.

        The watch ends when the API server ends it, or is silent for longer than between two bookmarks.
        """
        query = {"watch": "true", "labelSelector": selector, "timeoutSeconds": "7200", "allowWatchBookmarks": "true"}
        query |= {"resourceVersion": since} if since else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENT_SECONDS)
        with suppress(aiohttp.ServerTimeoutError):
            async with self._session.get(path, params=query, timeout=timeout) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    told = json.loads(line)
                    yield told["type"], told["object"]


def _page(following: str | None) -> dict[str, Any]:
    return {"limit": "500"} | ({"continue": following} if following else {})


@asynccontextmanager
async def connect(server: Server) -> AsyncIterator[Connection]:
    context = ssl.create_default_context(cafile=server.authority)
    context.load_cert_chain(server.client.certificate, server.client.key)
    connector = aiohttp.TCPConnector(ssl=context, limit=0)
    # Each line of a watch is a whole object.
    async with aiohttp.ClientSession(server.url, connector=connector, read_bufsize=2**24) as session:
        yield Connection(session)
