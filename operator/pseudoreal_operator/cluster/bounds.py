"""Bounds on responses of the API server: bytes, values and depth of a response, or of a line of a watch.

Anyone who may write an object in a namespace decides what the operator has to read. An object beyond the bounds is
logged, counted and skipped; all other objects are read. The cost of reading is bounded: from MOST_BYTES and
MOST_VALUES, Python makes objects of about 25 MB, in about 20 ms.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from aiohttp import ClientPayloadError
from pydantic_core import from_json

Json = dict[str, Any]

MOST_BYTES = 2**21
"""Maximum bytes of an object, and of a line of a watch. etcd stores objects of up to 1.5 MiB."""
MOST_PAGE_BYTES = 2**22
"""Maximum bytes of a page of several objects."""
MOST_VALUES = 100_000
"""Maximum number of JSON values of an object or a page. An empty map takes two bytes of JSON, but about a hundred in
memory."""
_DEPTH_WORDS = "recursion limit"
"""Part of the parser's error message for JSON that is nested more than 200 levels deep."""

TOO_LARGE, TOO_MANY_VALUES, TOO_DEEP, NO_JSON = "TooLarge", "TooManyValues", "TooDeep", "NoJson"
"""Reasons why an object is not read."""

_AFTER_METADATA = re.compile(b'"managedFields":|"spec":')
_ITEMS = b'"items":'
_TOKEN = re.compile(rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)"(:?)|["{}\[\]]', re.DOTALL)
"""A bracket of a JSON text, or a string: group 1 is its content, group 2 the colon after a key. A lone quotation mark
begins a truncated string. The quantifiers are possessive, because a string may have millions of characters."""
_MOST_TOKENS = 20_000
"""Maximum number of strings and brackets before the name of a custom resource; reading them takes about 10 ms."""
_IDENTITY = {
    b"name": re.compile(rb"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"),
    b"namespace": re.compile(rb"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"),
}
"""Metadata field that identifies a custom resource -> pattern of its value."""


class Unreadable(ValueError):
    """An object or a page is beyond a bound, or is not JSON. `reason`: one of the constants above."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class Stream(Protocol):
    """A stream of bytes, such as the content of a response."""

    def iter_any(self) -> AsyncIterator[bytes]: ...


@dataclass(frozen=True)
class Overlong:
    """A line of more than MOST_BYTES. `head`: its first MOST_BYTES."""

    head: bytes


def read_json(data: bytes | bytearray) -> Any:
    """Return the value of a JSON text. Raises Unreadable, never RecursionError."""
    # Every value except the first comes after one of these characters. Occurrences inside strings, which are few, are
    # counted as well.
    if sum(map(data.count, (b"{", b"[", b","))) > MOST_VALUES:
        raise Unreadable(TOO_MANY_VALUES, f"it has more than {MOST_VALUES:,} values")
    try:
        return from_json(data)
    except ValueError as error:
        if _DEPTH_WORDS in str(error):
            raise Unreadable(TOO_DEEP, "it is nested more than 200 levels deep") from None
        raise Unreadable(NO_JSON, f"it is no JSON: {error}") from None


async def read_all(stream: Stream, most: int) -> bytes:
    """Return all bytes of a stream. Raises Unreadable once there are more than `most`; the rest is not read."""
    data = bytearray()
    async for chunk in stream.iter_any():
        data += chunk
        if len(data) > most:
            raise Unreadable(TOO_LARGE, f"it has more than {most:,} bytes")
    return bytes(data)


async def read_head(stream: Stream) -> bytes:
    """Return the first MOST_BYTES of a stream, or all of it."""
    data = bytearray()
    async for chunk in stream.iter_any():
        data += chunk
        if len(data) >= MOST_BYTES:
            break
    return bytes(data[:MOST_BYTES])


async def read_lines(stream: Stream) -> AsyncIterator[bytes | Overlong]:
    """Yield the lines of a stream, without blank ones; Overlong for a line of more than MOST_BYTES. Bytes after the
    last line feed are dropped: they belong to a line that was cut off."""
    kept, is_overlong = bytearray(), False
    async for chunk in stream.iter_any():
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            if not is_overlong:
                kept += chunk[start:end]
                is_overlong = len(kept) > MOST_BYTES
            if is_overlong:
                yield Overlong(bytes(kept[:MOST_BYTES]))
            elif kept.strip():
                yield bytes(kept)
            kept, is_overlong, start = bytearray(), False, end + 1
        if not is_overlong:
            kept += chunk[start:]
            is_overlong = len(kept) > MOST_BYTES


def metadata_of(head: bytes) -> Json | None:
    """Return the metadata of the object in `head`; None if `head` does not contain its name. `head`: first bytes of an
    object, of a watch event, or of a list; for a list, the metadata of its first object is returned.

    Objects of built-in kinds, and metadata alone, are written in the order of their fields: name, namespace, uid and
    version come before everything that users write; the managed fields, which mirror the depth of the object, come
    last.
    """
    body = _partial(_AFTER_METADATA.split(head, 1)[0])
    body = body.get("object", body) if isinstance(body, dict) else {}
    items = body.get("items") if isinstance(body, dict) else None
    body = items[0] if isinstance(items, list) and items else body
    metadata = body.get("metadata") if isinstance(body, dict) else None
    return metadata if isinstance(metadata, dict) and isinstance(metadata.get("name"), str) else None


def page_head_of(head: bytes) -> Json:
    """Return a list's own metadata, which come before its items. Raises ClientPayloadError for an answer that is not a
    list."""
    page = _partial(head.partition(_ITEMS)[0])
    metadata = page.get("metadata") if isinstance(page, dict) else None
    if not isinstance(metadata, dict) or "resourceVersion" not in metadata:
        raise ClientPayloadError("the answer is no list of Kubernetes")
    return metadata


def name_of_unreadable(line: bytes) -> tuple[str, str] | None:
    """Return the namespace and name of the custom resource in an unparsable line of a watch; None if they are
    malformed, truncated, or not within the first _MOST_TOKENS.

    The fields of custom resources are sorted by name, so annotations, labels and managed fields come before name and
    namespace. Only depth and path of a field distinguish the genuine name from a name forged by a user, for instance in
    a label.
    """
    path, found, depth = [b""] * 4, dict[bytes, str](), 0
    for token in islice(_TOKEN.finditer(line), _MOST_TOKENS):
        match token[0]:
            case b"{" | b"[":
                depth += 1
            case b"}" | b"]":
                depth -= 1
            case b'"':
                break
            case _ if token[2] and 1 <= depth <= 3:
                path[depth] = token[1]
            case _ if depth == 3 and path[1:3] == [b"object", b"metadata"] and path[3] in _IDENTITY:
                if _IDENTITY[path[3]].fullmatch(token[1]):
                    found[path[3]] = token[1].decode()
        if len(found) == len(_IDENTITY):
            return found[b"namespace"], found[b"name"]
    return None


def _partial(head: bytes) -> Any:
    # The first MOST_VALUES bytes have no more values than that, and contain name, namespace, uid and version.
    read = head if sum(map(head.count, (b"{", b"[", b","))) <= MOST_VALUES else head[:MOST_VALUES]
    try:
        return from_json(read, allow_partial=True)
    except ValueError:
        return None
