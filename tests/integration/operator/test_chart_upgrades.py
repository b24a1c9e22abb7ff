"""`helm upgrade --reuse-values` from release 0.3.0: Helm puts the values of the release in place of the chart's own."""

import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from pseudoreal_dev.cluster.control_plane import ControlPlane
from pseudoreal_dev.machine import paths

from tests.support import chart
from tests.support.chart import KUBE_VERSION, RELEASE, find, render
from tests.support.cluster import Cluster

Json = dict[str, Any]

COMMIT = "f934f6a"
"""Commit of release 0.3.0."""
VALUES = paths.REPOSITORY / "tests" / "data" / "charts" / "pseudoreal-values-0.3.0.yaml"
IMAGES = ("--set=operator.image.repository=here/operator", "--set=trainer.image.repository=here/trainer")


def _since(new: Json, old: Json) -> Json:
    """Return the values of `new` that `old` does not have."""
    found = {name: value for name, value in new.items() if name not in old}
    for name, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(name), dict) and (inner := _since(value, old[name])):
            found[name] = inner
    return found


def test_values_that_are_new_since_the_release_are_listed_for_upgrades() -> None:
    """Add a new value, with its default, to files/values-since-0.3.0.yaml as well."""
    new, old = (yaml.safe_load(path.read_text()) for path in (chart.CHART / "values.yaml", VALUES))
    listed = yaml.safe_load((chart.CHART / "files" / "values-since-0.3.0.yaml").read_text())
    assert listed == _since(new, old)
    assert _since(old, new) == {}, "no value is gone"


@pytest.fixture
def reused(tmp_path: Path) -> Path:
    """This chart, with the values of release 0.3.0 as its only ones."""
    folder = shutil.copytree(chart.CHART, tmp_path / "chart")
    shutil.copy(VALUES, folder / "values.yaml")
    return folder


def _rendered(folder: Path, *values: str) -> list[Json]:
    where = f"--namespace={chart.NAMESPACE}"
    text = chart.helm("template", RELEASE, str(folder), where, KUBE_VERSION, *IMAGES, *values)
    return [document for document in yaml.safe_load_all(text) if document]


def test_chart_renders_the_same_with_reused_values(reused: Path) -> None:
    """Except for what release 0.3.0 allowed by default: hostNetwork."""
    new = render(*IMAGES, "--set=admissionPolicy.allow.hostNetwork=true", "--set=reports.tlsSecret=own")
    assert _rendered(reused, "--set=reports.tlsSecret=own") == new
    assert find(new, "Deployment")["spec"]["replicas"] == 2


@pytest.mark.parametrize(
    "values",
    [
        ("--set=metrics.alerts.enabled=true", "--set=metrics.dashboard.enabled=true"),
        ("--set=networkPolicy.enabled=true", "--set=admissionPolicy.enabled=false"),
        ("--set=reports.certManager.issuerRef.name=mine",),
        ("--set=podSecurityContext.runAsUser=null", "--set=reports.tlsSecret=own"),
    ],
)
def test_reused_values_take_options_of_this_chart(values: tuple[str, ...], reused: Path) -> None:
    more = ("--set=admissionPolicy.allow.hostNetwork=true",) if "enabled=false" not in values[-1] else ()
    assert _without_certificate(_rendered(reused, *values)) == _without_certificate(render(*IMAGES, *values, *more))


def _without_certificate(documents: list[Json]) -> list[Json]:
    """Leave out the Secret, whose certificate is another one each time the chart is rendered."""
    return [document for document in documents if document["kind"] != "Secret"]


def test_reused_values_without_an_image_are_refused(reused: Path) -> None:
    with pytest.raises(AssertionError, match="image"):
        _rendered(reused, "--set=operator.image.repository=")


@pytest.fixture
def released(control_plane: ControlPlane, cluster: Cluster, tmp_path: Path) -> Iterator[list[str]]:
    """Release 0.3.0 installed on the API server, with its own chart; helm's options for it."""
    archive = ["git", "-C", str(paths.REPOSITORY), "archive", COMMIT, "charts/pseudoreal"]
    done = subprocess.run(archive, capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"commit {COMMIT}, release 0.3.0, is not in this clone: git fetch --unshallow")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as content:
        content.extractall(tmp_path, filter="data")
    where = [f"--kubeconfig={control_plane.kubeconfig}", f"--namespace={cluster.namespace}"]
    old = str(tmp_path / "charts" / "pseudoreal")
    chart.helm("install", RELEASE, old, "--set=crds.install=false", "--set=operator.priorityClassName=high", *where)
    yield where
    chart.helm("uninstall", RELEASE, "--no-hooks", *where)


def test_release_is_upgraded_with_reused_values(released: list[str], cluster: Cluster) -> None:
    core, apps = client.CoreV1Api(cluster.api), client.AppsV1Api(cluster.api)

    def certificate() -> Json:
        return dict(core.read_namespaced_secret("pseudoreal-tls", cluster.namespace).data or {})

    before = certificate()
    chart.helm("upgrade", RELEASE, str(chart.CHART), "--reuse-values", *IMAGES, *released)
    spec = apps.read_namespaced_deployment(RELEASE, cluster.namespace).spec
    assert spec is not None
    assert spec.replicas == 2
    pod = spec.template.spec
    assert pod is not None
    assert pod.priority_class_name == "high", "a value of the release"
    assert str(pod.containers[0].image).startswith("here/operator:")
    assert certificate() == before
