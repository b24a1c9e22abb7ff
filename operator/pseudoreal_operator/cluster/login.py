"""Credentials for both clients: from KUBECONFIG if it is set, else from the pod's service account."""

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
"""Size in bytes of the buffer in which each connection keeps received data until it is read."""


@asynccontextmanager
async def connect(connections: int = 100, fence: Fence | None = None) -> AsyncIterator[Api]:
    """Yield a client with its own pool of `connections` connections; 0: no limit. `fence` checks every write."""
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
    """Make kopf log in with the same credentials, and with a session that receives jobs within bounds."""
    find = kopf.login_with_kubeconfig if os.environ.get("KUBECONFIG") else kopf.login_with_service_account

    # Async, so that kopf calls it in its loop, not in a thread: a session belongs to a loop.
    @kopf.on.login(registry=registry, id="login")
    async def login(**given: Any) -> kopf.AiohttpSession | None:
        info = find(**given)
        return None if info is None else make_session(info, contact)
