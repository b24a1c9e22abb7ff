"""Credentials for both clients: those of KUBECONFIG when it is set, else those of the pod."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import kopf
from kubernetes.aio import client, config

from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.cluster.bodies import send_utf8


@asynccontextmanager
async def connect(connections: int = 100) -> AsyncIterator[Api]:
    """A client with a pool of `connections` connections of its own; 0: of any number."""
    configuration = client.Configuration(client_session_kwargs={"middlewares": (send_utf8,)})
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
