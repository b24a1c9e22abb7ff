"""Request bodies: UTF-8 that parsers of JSON and of YAML read alike.

Server-side apply is sent as `application/apply-patch+yaml`. JSON is YAML except for a few characters: YAML has no
escapes for surrogates, and some characters are line breaks in YAML, or are not allowed (YAML 1.1, 5.1, 5.4 and 5.6).
"""

import json
import re
from typing import Any

from aiohttp import ClientHandlerType, ClientRequest, ClientResponse

_SURROGATES = re.compile("[\ud800-\udfff]")
"""Surrogates. In Python strings they are always unpaired: they stand for no character, and have no UTF-8 encoding."""
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that are written as \\uXXXX. They occur only inside strings, where both languages read the escape as
the character."""


def encode(value: Any) -> bytes:
    """Return a JSON value as the bytes of a body. Raises ValueError for a number that JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text = _SURROGATES.sub("\ufffd", text)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


async def send_utf8(request: ClientRequest, send: ClientHandlerType) -> ClientResponse:
    """Middleware that encodes bodies again: the Kubernetes client escapes every character outside ASCII, in each
    content type."""
    if request.body:
        await request.update_body(encode(json.loads(await request.body.as_bytes())))
    return await send(request)
