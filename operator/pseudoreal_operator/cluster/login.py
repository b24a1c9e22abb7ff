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


@asynccontextmanager
async def connect(connections: int = 100, fence: Fence | None = None) -> AsyncIterator[Api]:
    """A client with a pool of `connections` connections of its own; 0: of any number. `fence` is before what it
    writes."""
    session: dict[str, Any] = {"middlewares": (send_utf8,)}
    if fence is not None:
        session = {"middlewares": (fence.guard, send_utf8), "request_class": fence.requests()}
    configuration = client.Configuration(client_session_kwargs=session)
    configuration.connection_pool_maxsize = connections
    if os.environ.get("KUBECONFIG"):
        await config.load_kube_config(os.environ["KUBECONFIG"], client_configuration=configuration)
    else:
        config.load_incluster_config(configuration)
    async with client.ApiClient(configuration) as api_client:
        yield Api(api_client)


def register_login(registry: kopf.OperatorRegistry) -> None:
    login = kopf.login_with_kubeconfig if os.environ.get("KUBECONFIG") else kopf.login_with_service_account
    kopf.on.login(registry=registry, id="login")(login)
