"""Chooses the cluster like kubectl: flags, KUBECONFIG, the user's own kubeconfig, or the pod's service account."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from kubernetes import client, config
from pseudoreal_trainer.cli.common import ClusterOptions, CommandError, ExitStatus

from pseudoreal_client.cluster.api import Api

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True)
class Connection:
    api: Api
    namespace: str
    """Default namespace of commands."""
    is_named: bool = False
    """Whether the command line names the namespace."""


def connect(options: ClusterOptions) -> Connection:
    """Return the connection, without sending a request. Raises CommandError if no cluster is configured."""
    configuration = client.Configuration()
    try:
        usual = _load(options, configuration)
    except (config.ConfigException, OSError) as error:
        raise CommandError(
            f"no cluster is configured ({error}); set KUBECONFIG, or give --kubeconfig and --context;"
            " `kubectl config get-contexts` lists what there is",
            ExitStatus.NO_CLUSTER,
        ) from error
    # No retries: report an unreachable cluster at once.
    configuration.retries = False
    return Connection(
        Api(client.ApiClient(configuration), _warn), options.namespace or usual, options.namespace is not None
    )


def _warn(sentence: str) -> None:
    click.echo(sentence, err=True)


def _load(options: ClusterOptions, configuration: client.Configuration) -> str:
    """Fill the configuration; return the namespace of the context."""
    if options.kubeconfig is None and options.context is None and _runs_in_a_pod():
        config.load_incluster_config(configuration)
        return _ACCOUNT.read_text().strip()
    contexts, active = config.list_kube_config_contexts(options.kubeconfig)
    config.load_kube_config(options.kubeconfig, options.context, configuration)
    chosen: Any = next((one for one in contexts if one["name"] == options.context), active)
    return str(chosen["context"].get("namespace") or "default")


def _runs_in_a_pod() -> bool:
    has_file = "KUBECONFIG" in os.environ or Path(config.KUBE_CONFIG_DEFAULT_LOCATION).expanduser().exists()
    return not has_file and "KUBERNETES_SERVICE_HOST" in os.environ
