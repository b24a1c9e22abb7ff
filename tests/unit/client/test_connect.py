"""Selection of the cluster and the namespace."""

from pathlib import Path

import pytest
import yaml
from kubernetes import client, config
from pseudoreal import connect as module
from pseudoreal.connect import connect
from pseudoreal.errors import NoCluster
from pseudoreal_client.commands.options import exit_status
from pseudoreal_trainer.cli.common import ExitStatus


@pytest.fixture
def kubeconfig(tmp_path: Path) -> str:
    """Return the path of a kubeconfig with two contexts; the second, not current, names a namespace."""
    contexts = [{"name": "one", "context": {"cluster": "c", "user": "u"}}]
    contexts.append({"name": "two", "context": {"cluster": "c", "user": "u", "namespace": "team"}})
    body = {
        "contexts": contexts,
        "current-context": "one",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {}}],
    }
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(body))
    return str(path)


@pytest.mark.parametrize(
    ("namespace", "context", "meant", "is_named"),
    [(None, None, "default", False), (None, "two", "team", False), ("mine", "two", "mine", True)],
)
def test_namespace_comes_from_the_option_or_else_the_context(
    kubeconfig: str, namespace: str | None, context: str | None, meant: str, is_named: bool
) -> None:
    found = connect(context, namespace, kubeconfig, print)
    assert (found.namespace, found.is_named) == (meant, is_named)


def test_the_variable_counts_as_it_is_when_the_client_is_made(kubeconfig: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook may set it after its imports."""
    monkeypatch.setenv("KUBECONFIG", kubeconfig)
    assert connect("two", None, None, print).namespace == "team"


def test_an_unknown_context_is_an_error(kubeconfig: str) -> None:
    with pytest.raises(NoCluster, match=r"no cluster is configured.*three") as refused:
        connect("three", None, kubeconfig, print)
    assert exit_status(refused.value) is ExitStatus.NO_CLUSTER


@pytest.mark.parametrize(("context", "namespace"), [(None, "pods"), ("two", "team")])
def test_a_pod_uses_its_service_account_unless_options_name_a_cluster(
    context: str | None, namespace: str, kubeconfig: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(configuration: client.Configuration) -> None:
        configuration.host = "http://127.0.0.1:2"

    (tmp_path / "namespace").write_text("pods\n")
    monkeypatch.setattr(module, "_ACCOUNT", tmp_path / "namespace")
    monkeypatch.setattr(config, "load_incluster_config", load)
    monkeypatch.setattr(config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert connect(context, None, kubeconfig if context else None, print).namespace == namespace
