"""The CustomResourceDefinition on a real API server: what it refuses, what it fills in, how it reads."""

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from pseudoreal_api.publish import crd
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_dev.cluster import binaries
from pseudoreal_dev.cluster.control_plane import ControlPlane
from pseudoreal_dev.machine import paths

from tests.jobs import BadJob, bad_jobs, example_jobs, good_job

pytestmark = pytest.mark.integration
Kubectl = Callable[..., subprocess.CompletedProcess[str]]
CRD = paths.REPOSITORY / "crds" / crd.FILE_NAME


@pytest.fixture(scope="module")
def kubectl(control_plane: ControlPlane) -> Kubectl:
    command = [str(binaries.build().path("kubectl")), f"--kubeconfig={control_plane.kubeconfig}"]

    def run(*arguments: str, body: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        text = json.dumps(body) if body else None
        return subprocess.run([*command, *arguments], input=text, capture_output=True, text=True, timeout=60)

    # Another test file of the same run may have installed it already.
    applied = run("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    assert applied.returncode == 0, applied.stderr
    assert run("wait", "--for=condition=Established", "-f", str(CRD), "--timeout=30s").returncode == 0
    return run


def _create(kubectl: Kubectl, body: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return kubectl("create", "--dry-run=server", "--output=json", "-f", "-", body=body)


@pytest.mark.parametrize("bad", bad_jobs(), ids=lambda bad: bad.name)
def test_a_bad_job_is_refused_with_the_field_and_the_values(kubectl: Kubectl, bad: BadJob) -> None:
    answer = _create(kubectl, bad.body)
    assert answer.returncode != 0
    for piece in bad.says:
        assert piece.lower() in answer.stderr.lower()


@pytest.mark.parametrize("body", example_jobs(), ids=lambda body: body["metadata"]["name"])
def test_the_examples_are_accepted(kubectl: Kubectl, body: dict[str, Any]) -> None:
    answer = _create(kubectl, body)
    assert answer.returncode == 0, answer.stderr
    # Nothing that a user wrote is pruned or changed.
    assert PseudoRealJob.from_object(json.loads(answer.stdout)).spec == PseudoRealJob.from_object(body).spec


def test_the_defaults_of_the_server_are_those_of_the_models(kubectl: Kubectl) -> None:
    answer = _create(kubectl, good_job())
    assert answer.returncode == 0, answer.stderr
    assert PseudoRealJob.from_object(json.loads(answer.stdout)).spec == PseudoRealJob.from_object(good_job()).spec
    # The server itself filled them in: the user's file says nothing of these.
    assert json.loads(answer.stdout)["spec"]["phases"][0]["parallelism"]["schedule"] == "layered"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec__model__layers", 16),
        ("spec__phases__1__until__steps", 30),
        ("spec__data__path", "elsewhere"),
        ("spec__checkpoint__everySteps", 7),
        ("spec__optimizer", {"learningRate": "1e-3"}),
    ],
)
def test_what_training_depends_on_is_immutable(kubectl: Kubectl, path: str, value: Any) -> None:
    assert kubectl("apply", "-f", "-", body=good_job("fixed")).returncode == 0
    answer = kubectl("apply", "-f", "-", body=good_job("fixed", **{path: value}))
    assert answer.returncode != 0
    assert f"spec.{path.split('__')[1]} is immutable" in answer.stderr


def test_what_running_depends_on_may_change(kubectl: Kubectl) -> None:
    assert kubectl("apply", "-f", "-", body=good_job("open")).returncode == 0
    changed = good_job(
        "open", spec__suspend=True, spec__restart={"maxRestarts": 9}, spec__deadlines={"activeSeconds": 60}
    )
    assert kubectl("apply", "-f", "-", body=changed).returncode == 0


def test_the_status_is_a_subresource(kubectl: Kubectl) -> None:
    body = good_job("honest") | {"status": {"phase": "Succeeded"}}
    assert kubectl("apply", "-f", "-", body=body).returncode == 0
    assert "status" not in json.loads(kubectl("get", "prj", "honest", "-o", "json").stdout)


def test_explain_reads_well(kubectl: Kubectl) -> None:
    said = " ".join(kubectl("explain", "prj.spec.phases").stdout.split())
    assert "phases are trained in this order. Between two phases the layers" in said
    assert "sharing says which layers share weights. Omitted: every layer owns its weights." in said
    assert "cosine" in kubectl("explain", "prj.spec.optimizer.schedule").stdout


def test_lists_name_the_columns_and_the_categories(kubectl: Kubectl) -> None:
    assert kubectl("apply", "-f", "-", body=good_job("listed")).returncode == 0
    assert kubectl("get", "prj", "listed").stdout.split()[:7] == [
        "NAME", "PHASE", "STEP", "LOSS", "PROGRESS", "RESTARTS", "AGE",
    ]  # fmt: skip
    for category in ("all", "training"):
        assert "pseudorealjob.pseudoreal.dev/listed" in kubectl("get", category, "-o", "name").stdout
