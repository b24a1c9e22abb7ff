"""Chooses the cluster like kubectl: arguments, KUBECONFIG, the user's own kubeconfig, or the pod's service account."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import client, config

from pseudoreal.api import Api
from pseudoreal.errors import NoCluster

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True)
class Connection:
    api: Api
    namespace: str
    """Default namespace."""
    is_named: bool = False
    """Whether the caller named the namespace; else the context did."""


def connect(
    context: str | None, namespace: str | None, kubeconfig: str | None, warn: Callable[[str], None]
) -> Connection:
    """Return the connection, without sending a request. Raises NoCluster if no cluster is configured."""
    configuration = client.Configuration()
    try:
        usual = _load(context, kubeconfig, configuration)
    except (config.ConfigException, OSError) as error:
        raise NoCluster(
            f"no cluster is configured ({error}); set KUBECONFIG, or give --kubeconfig and --context;"
            " `kubectl config get-contexts` lists what there is"
        ) from error
    # No retries: report an unreachable cluster at once.
    configuration.retries = False
    # A followed log may be silent for hours: only TCP notices that its API server is gone.
    configuration.keep_alive = True
    return Connection(Api(client.ApiClient(configuration), warn), namespace or usual, namespace is not None)


def _load(context: str | None, kubeconfig: str | None, configuration: client.Configuration) -> str:
    """Fill the configuration; return the namespace of the context."""
    if kubeconfig is None and context is None and _runs_in_a_pod():
        config.load_incluster_config(configuration)
        return _ACCOUNT.read_text().strip()
    # kubernetes itself reads the variable once, when it is imported.
    file = kubeconfig or os.environ.get("KUBECONFIG") or None
    contexts, active = config.list_kube_config_contexts(file)
    config.load_kube_config(file, context, configuration)
    chosen: Any = next((one for one in contexts if one["name"] == context), active)
    return str(chosen["context"].get("namespace") or "default")


def _runs_in_a_pod() -> bool:
    has_file = "KUBECONFIG" in os.environ or Path(config.KUBE_CONFIG_DEFAULT_LOCATION).expanduser().exists()
    return not has_file and "KUBERNETES_SERVICE_HOST" in os.environ
