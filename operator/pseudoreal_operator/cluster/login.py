"""Credentials of the operator's and kopf's clients, and the encoding of request bodies. Credentials come from
KUBECONFIG if it is set, else from the pod's service account.

Request bodies are UTF-8 that parsers of JSON and of YAML read alike: server-side apply is sent as
`application/apply-patch+yaml`. JSON is YAML except for a few characters: YAML has no escapes for surrogates, and some
characters are line breaks in YAML, or are not allowed (YAML 1.1, 5.1, 5.4 and 5.6).
"""

import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import kopf
from aiohttp import ClientHandlerType, ClientRequest, ClientResponse
from kubernetes.aio import client, config

from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.cluster.fence import Fence
from pseudoreal_operator.cluster.kopf_session import Contact, make_session

_BUFFER_BYTES = 2**16
"""Size in bytes of the buffer in which each connection keeps received data until it is read."""
_SURROGATES = re.compile("[\ud800-\udfff]")
"""Surrogates. In a Python string, surrogates are always unpaired: they stand for no character, and have no UTF-8
encoding."""
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters to write as \\uXXXX. They occur only inside strings, where JSON and YAML both read the escape as the
character."""


@asynccontextmanager
async def connect(connections: int = 100, fence: Fence | None = None) -> AsyncIterator[Api]:
    """Yield a client with its own pool of `connections` connections; 0: no limit. `fence` checks every write."""
    session: dict[str, Any] = {"middlewares": (send_utf8,), "read_bufsize": _BUFFER_BYTES}
    if fence is not None:
        session |= {"middlewares": (fence.guard, send_utf8), "request_class": fence.request_class()}
    configuration = client.Configuration(client_session_kwargs=session)
    configuration.connection_pool_maxsize = connections
    if os.environ.get("KUBECONFIG"):
        await config.load_kube_config(os.environ["KUBECONFIG"], client_configuration=configuration)
    else:
        config.load_incluster_config(configuration)
    async with client.ApiClient(configuration) as api_client:
        yield Api(api_client)


def register_login(registry: kopf.OperatorRegistry, contact: Contact) -> None:
    """Make kopf log in with the operator's credentials, over a session that bounds responses with jobs."""
    find = kopf.login_with_kubeconfig if os.environ.get("KUBECONFIG") else kopf.login_with_service_account

    # Async, so that kopf calls it in its loop, not in a thread: a session belongs to a loop.
    @kopf.on.login(registry=registry, id="login")
    async def login(**given: Any) -> kopf.AiohttpSession | None:
        info = find(**given)
        return None if info is None else make_session(info, contact)


def encode_body(value: Any) -> bytes:
    """Encode a JSON value as a request body. Raises ValueError for NaN and infinities, which JSON lacks."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text = _SURROGATES.sub("\ufffd", text)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


async def send_utf8(request: ClientRequest, send: ClientHandlerType) -> ClientResponse:
    """aiohttp middleware: encode the JSON body again with `encode_body`, because the Kubernetes client escapes every
    non-ASCII character."""
    if request.body:
        await request.update_body(encode_body(json.loads(await request.body.as_bytes())))
    return await send(request)
