"""Bodies of requests: UTF-8 that both JSON and YAML read as what was meant.

Server-side apply is sent as `application/apply-patch+yaml`. JSON is YAML but for a few characters: YAML knows no
escapes of surrogates, and some characters are line breaks in it, or may not stand in it (YAML 1.1, 5.1, 5.4 and 5.6).
"""

import json
import re
from typing import Any

from aiohttp import ClientHandlerType, ClientRequest, ClientResponse

_SURROGATES = re.compile("[\ud800-\udfff]")
"""Surrogates. In Python's strings they are always alone: they stand for no character, and UTF-8 has none for them."""
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that are written as \\uXXXX. They can only be inside of strings, where both languages read that as the
character."""


def encode(value: Any) -> bytes:
    """A JSON value as the bytes of a body. Raises ValueError for a number that JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text = _SURROGATES.sub("\ufffd", text)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


async def send_utf8(request: ClientRequest, send: ClientHandlerType) -> ClientResponse:
    """A middleware: the client of Kubernetes escapes whatever is not ASCII, in every content type."""
    if request.body:
        await request.update_body(encode(json.loads(await request.body.as_bytes())))
    return await send(request)
