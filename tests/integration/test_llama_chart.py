"""The example chart: the API server accepts all of it, and its scripts work on this machine as in pods."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from pseudoreal_api.spec.check import check_job
from pseudoreal_dev.demo import exported, llama
from pseudoreal_dev.machine import paths

from tests.support.chart import KUBE_VERSION, find, helm
from tests.support.kubectl import Kubectl

pytestmark = pytest.mark.integration
Json = dict[str, Any]

CHART = str(paths.REPOSITORY / "charts" / "pseudoreal-llama")
IMAGE = "--set=image=registry.example/trainer:1"
OWN_TEXT = ("--set=text.volume.configMap.name=mine", "--set=storage.className=fast")
SMALL = ("--set=vocabularySize=300", "--set=steps.pseudo=2", "--set=steps.real=4", "--set=text.folder=/book")


def template(*values: str) -> str:
    return helm("template", llama.JOB, CHART, KUBE_VERSION, IMAGE, *values)


def rendered(*values: str) -> list[Json]:
    return [document for document in yaml.safe_load_all(template(*values)) if document]


def container(documents: list[Json], job: str) -> Json:
    (found,) = find(documents, "Job", job)["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.fixture(scope="module")
def restricted(admin: client.ApiClient) -> Iterator[str]:
    """A namespace enforcing the restricted Pod Security Standard."""
    core, name = client.CoreV1Api(admin), "llama"
    levels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    core.create_namespace(client.V1Namespace(metadata=client.V1ObjectMeta(name=name, labels=levels)))
    yield name
    core.delete_namespace(name)


@pytest.mark.parametrize("values", [(), OWN_TEXT], ids=["text of the image", "text of one's own"])
def test_the_api_server_accepts_the_llama_chart(
    values: tuple[str, ...], kubectl: Kubectl, restricted: str, tmp_path: Path
) -> None:
    helm("lint", "--strict", KUBE_VERSION, CHART, IMAGE, *values)
    (tmp_path / "all.yaml").write_text(template(f"--namespace={restricted}", *values))
    done = kubectl("apply", "--dry-run=server", "--validate=strict", "-f", str(tmp_path / "all.yaml"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "nothing that it warns of"
    assert len(done.stdout.splitlines()) == 5, "two claims, two Jobs, a PseudoRealJob"


@pytest.mark.parametrize(
    ("value", "says"), [("vocabularySize=100", "/vocabularySize"), ("textvolume=mine", "'textvolume' not allowed")]
)
def test_the_llama_chart_rejects_invalid_values(value: str, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        rendered(f"--set={value}")


def test_without_an_image_the_llama_chart_says_how_to_build_it() -> None:
    with pytest.raises(AssertionError, match="docker build --target trainer --tag REGISTRY/pseudoreal-trainer:"):
        helm("template", llama.JOB, CHART, KUBE_VERSION)


def test_each_step_of_the_llama_chart_reads_the_folder_of_the_step_before() -> None:
    documents = rendered("--set=steps.real=120")
    job = check_job(find(documents, "PseudoRealJob", llama.JOB))
    folders = {source.path or source.name for source in (*job.spec.data.sources, *job.spec.data.validation.sets)}
    prepare, export = (container(documents, f"{llama.JOB}-{name}") for name in ("prepare", "export"))
    for folder in (*folders, "tokenizer"):
        assert folder in prepare["args"][0]
    assert "for part in train validation; do" in prepare["args"][0], "training waits for the one that is written last"
    (waits,) = job.spec.pod.template["spec"]["initContainers"]
    assert f"{job.spec.data.path}/{job.spec.data.validation.sets[0].name}/index.json" in waits["command"][-1]
    until = job.spec.phases[-1].until.step
    assert {"name": "CHECKPOINT", "value": f"{job.spec.phases[-1].name}-{until:08d}"} in export["env"]
    assert {c["metadata"]["name"] for c in documents if c["kind"] == "PersistentVolumeClaim"} == {
        *llama.CLAIMS.values()
    }


def test_an_export_without_a_model_fails_at_once() -> None:
    """Training may fail, and then no model to export ever exists."""
    specs = {name: find(rendered(), "Job", f"{llama.JOB}-{name}")["spec"] for name in ("prepare", "export")}
    assert specs["export"]["activeDeadlineSeconds"] == 86_400
    short = find(rendered("--set=exportDeadlineSeconds=60"), "Job", f"{llama.JOB}-export")["spec"]
    assert short["activeDeadlineSeconds"] == 60
    assert "activeDeadlineSeconds" not in specs["prepare"]


def start(found: Json, places: dict[str, Path]) -> "subprocess.Popen[str]":
    """Start a container as a process of this machine. `places` maps paths in the pod to local folders."""
    given = {entry["name"]: entry["value"] for entry in found["env"]}
    here = {name: str(places.get(value, value)) for name, value in given.items()}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **here, "PATH": path, "TMPDIR": str(places["/tmp"])}
    return begun([*found["command"], *found["args"]], environment)


def begun(command: list[str], environment: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end_of(process: "subprocess.Popen[str]") -> str:
    """Wait for the process to succeed, and return its output."""
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def test_the_export_takes_the_newest_of_several_jobs_with_one_name(tmp_path: Path) -> None:
    """The claim may still contain a folder of the previous job."""
    data, checkpoints = tmp_path / "data", tmp_path / "checkpoints"
    data.mkdir()
    for time, uid in enumerate(("33333333", "11111111", "22222222")):
        manifest = checkpoints / f"{llama.JOB}-{uid}" / "checkpoints" / "real-00000240" / "manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.touch()
        os.utime(manifest, (time, time))
    (tmp_path / "python").write_text('#!/bin/sh\nmkdir export.part; echo "$@" >export.part/asked\n')
    (tmp_path / "python").chmod(0o755)
    found = container(rendered(), f"{llama.JOB}-export")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB": llama.JOB, "CHECKPOINT": "real-00000240"}
    environment |= {"DATA": str(data), "CHECKPOINTS": str(checkpoints)}
    end_of(begun([*found["command"], *found["args"]], environment))
    asked = (data / "export" / "asked").read_text()
    assert f"export {manifest.parent} --format huggingface" in asked


@pytest.mark.long
def test_the_llama_chart_turns_text_into_a_model_for_transformers(tmp_path: Path) -> None:
    """Takes about a minute: five programs importing torch or transformers, two of them twice."""
    places = {f"/{name}": tmp_path / name for name in ("data", "checkpoints", "book", "tmp")}
    for folder in places.values():
        folder.mkdir()
    verses = [f"{number} And the evening and the morning were the day {number % 7}.\n" for number in range(2000)]
    (places["/book"] / "book.txt").write_text("".join(verses))
    documents = rendered(*SMALL)
    exports = start(container(documents, f"{llama.JOB}-export"), places)
    prepare = container(documents, f"{llama.JOB}-prepare")
    assert "tokenizer.json: " in end_of(start(prepare, places))
    assert "tokenizer.json: " not in end_of(start(prepare, places)), "what is there is not made again"

    job = find(documents, "PseudoRealJob", llama.JOB)
    job["spec"]["data"]["path"] = str(places["/data"])
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    assert exports.poll() is None, "it waits"
    work = places["/checkpoints"] / f"{llama.JOB}-12345678"
    command = [sys.executable, "-m", "pseudoreal_trainer.cli.command", "run", str(tmp_path / "job.yaml")]
    end_of(
        subprocess.Popen(
            [*command, "--workdir", str(work)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    )
    end_of(exports)

    lines = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    found = exported.judge(places["/data"] / "export", places["/data"] / "validation", "And the evening")
    assert found.loss == pytest.approx(lines[-1]["validation_loss"], abs=1e-5)
    assert set(lines[-1]["bits_per_byte"]) == {"validation"}
    assert found.sample
