"""Credentials for both clients: those of KUBECONFIG when it is set, else those of the pod."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import kopf
from kubernetes.aio import client, config

from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.cluster.bodies import send_utf8
from pseudoreal_operator.cluster.fence import Fence
from pseudoreal_operator.cluster.kopf_session import Contact, make_session

_BUFFER_BYTES = 2**16
"""Bytes that each connection keeps until they are read."""


@asynccontextmanager
async def connect(connections: int = 100, fence: Fence | None = None) -> AsyncIterator[Api]:
    """A client with a pool of `connections` connections of its own; 0: of any number. `fence` is before what it
    writes."""
    session: dict[str, Any] = {"middlewares": (send_utf8,), "read_bufsize": _BUFFER_BYTES}
    if fence is not None:
        session |= {"middlewares": (fence.guard, send_utf8), "request_class": fence.requests()}
    configuration = client.Configuration(client_session_kwargs=session)
    configuration.connection_pool_maxsize = connections
    if os.environ.get("KUBECONFIG"):
        await config.load_kube_config(os.environ["KUBECONFIG"], client_configuration=configuration)
    else:
        config.load_incluster_config(configuration)
    async with client.ApiClient(configuration) as api_client:
        yield Api(api_client)


def register_login(registry: kopf.OperatorRegistry, contact: Contact) -> None:
    """Has kopf log in with the same credentials, and with a session by which it hears of jobs within bounds."""
    find = kopf.login_with_kubeconfig if os.environ.get("KUBECONFIG") else kopf.login_with_service_account

    # Not in a thread: a session belongs to a loop.
    @kopf.on.login(registry=registry, id="login")
    async def login(**given: Any) -> kopf.AiohttpSession | None:
        info = find(**given)
        return None if info is None else make_session(info, contact)
