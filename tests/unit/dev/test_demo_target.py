"""Which cluster the demo takes, what it says about it, and what it refuses; the programs on the PATH are fakes."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from pseudoreal_dev.cluster import binaries, cluster, preflight
from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo import chart, in_containers, target
from pseudoreal_dev.images import images
from pseudoreal_dev.machine import packages
from pseudoreal_dev.machine.errors import DevError

from tests.unit.dev.support import fakes
from tests.unit.dev.support.programs import Programs
from tests.unit.dev.test_preflight import FIT

EVERYTHING = ("docker", "kind", "minikube", "k3d", "kubectl", "helm")
CREATED = {
    "kind": ["kind create cluster --name=pseudoreal-demo --kubeconfig={file} --wait=10m"],
    "minikube": ["KUBECONFIG={file} minikube start --profile=pseudoreal-demo --driver=docker --interactive=false"],
    "k3d": [
        "k3d cluster create pseudoreal-demo --kubeconfig-update-default=false --timeout=10m",
        "k3d kubeconfig get pseudoreal-demo",
    ],
}
RESUMED = {
    "kind": ["kind export kubeconfig --name=pseudoreal-demo --kubeconfig={file}"],
    "minikube": CREATED["minikube"],
    "k3d": ["k3d cluster start pseudoreal-demo --timeout=10m", "k3d kubeconfig get pseudoreal-demo"],
}
LOADED = {
    "kind": "kind load image-archive {archive} --name={cluster}",
    "minikube": "minikube image load {archive} --profile={cluster}",
    "k3d": "k3d image import {archive} --cluster={cluster}",
}
LISTS = ("get clusters", "profile list", "cluster list", "image ls")


class OwnCluster(Exception):
    """The demo begins to build a cluster of its own."""


@pytest.fixture(autouse=True)
def machine(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Debian of the user, not root, that could have a cluster of its own as root; none is up."""

    def begin() -> NoReturn:
        raise OwnCluster

    monkeypatch.setattr(preflight, "look", lambda: replace(FIT, is_root=os.geteuid() == 0))
    monkeypatch.setattr(cluster, "status", lambda: cluster.Status((), "the cluster is not up"))
    programs.add("apt-get", {"indextargets*": "echo 'Debian|stable|trixie|trixie|main|http://a/'"})
    programs.add("apt-cache", {"madison*": "echo 'python3 | 3.13.5-1 | http://a trixie/main amd64 Packages'"})
    monkeypatch.setattr(packages, "install_missing", lambda: None)
    monkeypatch.setattr(images, "build_base", begin)
    monkeypatch.setattr(in_containers, "ANSWER_SECONDS", 0)
    be_user(monkeypatch)


def be_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)


def be_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)


def changes(programs: Programs, tool: str) -> list[str]:
    """Return what the program was told to do, without what it was asked."""
    return [call for call in programs.calls(tool) if not any(question in call for question in LISTS)]


def file_of(tool: str) -> str:
    return os.environ["PSEUDOREAL_CACHE"] + f"/demo/{tool}.kubeconfig"


@pytest.mark.parametrize("tool", ["kind", "minikube", "k3d"])
def test_the_demo_makes_a_cluster_in_docker(tool: str, programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    """Its kubeconfig is a file of its own, so the user's own, and with it the current context, stays as it is."""
    fakes.add(programs, "docker", tool, "kubectl", "helm")
    found = target.choose()
    said = capsys.readouterr().out
    assert f"The demo runs on {tool}: it, kubectl and helm are on the PATH, and Docker answers." in said
    assert f"stays until `{tool} " in said
    created = [line.format(file=file_of(tool)) for line in CREATED[tool]]
    archives = [f"{os.environ['PSEUDOREAL_CACHE']}/images/{image}.tar" for image in ("operator", "trainer")]
    loaded = [LOADED[tool].format(archive=archive, cluster="pseudoreal-demo") for archive in archives]
    assert changes(programs, tool) == created + loaded
    assert not any(Path(archive).exists() for archive in archives)
    assert found.reaching == f"export KUBECONFIG={file_of(tool)}"
    assert f"{tool} " in found.ending
    assert "delete" in found.ending
    assert "pseudoreal-demo" in found.ending
    assert all(f"--kubeconfig={file_of(tool)}" in call for call in programs.calls("kubectl"))


@pytest.mark.parametrize("tool", ["kind", "minikube", "k3d"])
def test_a_second_run_takes_the_cluster_and_the_images_that_exist(tool: str, programs: Programs) -> None:
    fakes.add(programs, "docker", tool, "kubectl", "helm")
    first = target.choose()
    before = len(programs.calls())
    images = [{"names": ["x@sha256:1", first.operator_image]}, {"names": [first.trainer_image]}]
    nodes = json.dumps({"items": [{"status": {"images": images}}]})
    programs.add("kubectl", {"*get nodes*": f"echo '{nodes}'"})
    assert target.choose().trainer_image == first.trainer_image
    again = programs.calls()[before:]
    assert not [call for call in again if " build " in call or " save " in call]
    wanted = [line.format(file=file_of(tool)) for line in RESUMED[tool]]
    assert [call for call in again if f"{tool} " in call and not any(question in call for question in LISTS)] == wanted


def test_the_images_are_for_cpus_and_have_no_attestation(programs: Programs) -> None:
    """An archive with one lacks a part, and the node would refuse it."""
    fakes.add(programs, "docker", "kind", "kubectl", "helm")
    found = target.choose()
    operator, trainer = (call for call in programs.calls("docker") if " build " in call)
    context = f"{os.environ['PSEUDOREAL_CACHE']}/images/context"
    prefix, rest = "BUILDX_NO_DEFAULT_ATTESTATIONS=1 docker build", f"--file {context}/Dockerfile {context}"
    assert operator == f"{prefix} --target operator --tag {found.operator_image} {rest}"
    assert trainer == f"{prefix} --target trainer --build-arg TORCH=cpu --tag {found.trainer_image} {rest}"
    assert found.trainer_image.startswith("localhost/pseudoreal-trainer:")


def test_kind_comes_before_minikube_and_k3d(programs: Programs) -> None:
    fakes.add(programs, *EVERYTHING)
    target.choose()
    assert programs.calls("minikube") == programs.calls("k3d") == []


def test_minikube_is_no_choice_for_root(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses root with the driver docker; so does not the cluster of our own, which needs root."""
    be_root(monkeypatch)
    fakes.add(programs, "docker", "minikube", "kubectl", "helm")
    with pytest.raises(OwnCluster):
        target.choose()
    assert programs.calls("minikube") == []


@pytest.mark.parametrize(
    ("there", "answers", "reason"),
    [
        ((), {}, "because kind, minikube and k3d are not on the PATH; kubectl is not on the PATH; helm is not on"),
        (("docker", "kubectl", "helm"), {}, "because kind, minikube and k3d are not on the PATH."),
        (("docker", "minikube", "kubectl", "helm"), {}, "only minikube is on the PATH, and it refuses root."),
        (("docker", "kind", "kubectl"), {}, "helm is not on the PATH."),
        (EVERYTHING, {"info*": f"echo '{fakes.NO_DAEMON}' >&2; exit 1"}, f"Docker does not answer ({fakes.NO_DAEMON})"),
        (EVERYTHING, {"info*": f"""echo '{{"ServerErrors":["{fakes.NO_DAEMON}"]}}'"""}, f"({fakes.NO_DAEMON})"),
        (EVERYTHING, {"info*": "echo podman"}, "the program docker is not Docker's: `docker info` says 'podman"),
        (EVERYTHING, {"info*": """echo '{"host":{"os":"linux"}}'"""}, "the program docker is not Docker's"),
        (EVERYTHING, {"info*": f"echo '{fakes.DAEMON.replace('linux', 'windows')}'"}, "Docker runs windows containers"),
        (EVERYTHING, {"info*": f"echo '{fakes.DAEMON.replace('8218', '2054')}'"}, "Docker has 1.9 GiB of memory"),
    ],
)  # fmt: skip
def test_root_gets_a_cluster_of_our_own_where_docker_or_a_program_is_missing(
    there: tuple[str, ...],
    answers: dict[str, str],
    reason: str,
    programs: Programs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    be_root(monkeypatch)
    fakes.add(programs, *there)
    if answers:
        programs.add("docker", answers)
    with pytest.raises(OwnCluster):
        target.choose()
    said = " ".join(capsys.readouterr().out.split())
    assert "The demo runs on a cluster of its own on this machine, because" in said
    assert reason in said
    assert all("create" not in call and "start" not in call for call in programs.calls())


def test_dockers_own_disk_must_have_room(programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of another machine, or of Docker Desktop's, cannot be looked at."""
    fakes.add(programs, *EVERYTHING)
    assert in_containers.docker_problems() == []
    programs.add("docker", {"info*": f"echo '{fakes.DAEMON.replace('/nowhere/docker', str(tmp_path))}'"})
    monkeypatch.setattr(in_containers, "DISK_GIB", 2**40)
    (problem,) = in_containers.docker_problems()
    assert f"GiB are free at {tmp_path}" in problem.missing


def test_a_daemons_folder_that_is_closed_to_the_user_is_no_problem(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(_: Path) -> NoReturn:
        raise PermissionError

    programs.add("docker", {"info*": f"echo '{fakes.DAEMON.replace('/nowhere/docker', str(tmp_path))}'"})
    monkeypatch.setattr("shutil.disk_usage", closed)
    assert in_containers.docker_problems() == []


def test_who_may_not_talk_to_docker_hears_how_to_be_allowed(programs: Programs) -> None:
    """Docker runs, so starting it would help nobody."""
    refusal = "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock"
    programs.add("docker", {"info*": f"echo '{refusal}' >&2; exit 1"})
    (problem,) = in_containers.docker_problems()
    assert refusal in problem.missing
    assert problem.remedy == "Join the group docker and log in again, or use sudo"


def test_a_daemon_that_hangs_is_not_waited_for(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pseudoreal_dev.machine.docker.ANSWER_SECONDS", 0.2)
    programs.add("docker", {"info*": "exec /bin/sleep 60"})
    (problem,) = in_containers.docker_problems()
    assert "no answer within 0 s" in problem.missing


def test_every_alternative_is_told_with_all_that_it_lacks(programs: Programs) -> None:
    """In one message, and before anything is built, created or installed."""
    fakes.add(programs, "kind", "docker", "kubectl")
    programs.add("docker", {"info*": f"echo '{fakes.NO_DAEMON}' >&2; exit 1"})
    with pytest.raises(DevError) as refused:
        target.choose()
    assert str(refused.value).splitlines() == [
        "The demo needs one of these, and each lacks something:",
        "- kind, minikube or k3d, in Docker",
        "    helm is not on the PATH. Install it: https://helm.sh/docs/intro/install",
        f"    Docker does not answer ({fakes.NO_DAEMON}). Start Docker",
        "- a cluster of its own on this machine",
        "    this is not root, who alone may make network namespaces and containers. Use sudo",
        "- a cluster of yours",
        "    KUBE_CONTEXT is not set. Set it to a context of kubectl: docs/demo.md",
        "Without Kubernetes, `make run` trains a model in local processes.",
    ]
    asked = ("docker info", "apt-get indextargets", "apt-cache madison")
    assert all(call.startswith(asked) for call in programs.calls())


def test_on_macos_only_docker_will_do(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "look", lambda: replace(FIT, system="Darwin", is_root=False, go=""))
    with pytest.raises(
        DevError, match=r"this is Darwin, and the cluster needs Linux. Use a Linux machine or VM"
    ) as refused:
        target.choose()
    assert "this is not root" not in str(refused.value)
    fakes.add(programs, "docker", "k3d", "kubectl", "helm")
    assert "k3d" in target.choose().ending


def test_the_cluster_of_our_own_is_taken_where_it_is_up(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has called `make cluster-up` wants that one."""
    be_root(monkeypatch)
    fakes.add(programs, *EVERYTHING)
    monkeypatch.setattr(cluster, "status", lambda: cluster.Status((), ""))
    with pytest.raises(OwnCluster):
        target.choose()
    assert not [call for call in programs.calls() if "apt" not in call]


def test_what_depends_on_the_machine_comes_before_the_compilation(
    monkeypatch: pytest.MonkeyPatch, programs: Programs
) -> None:
    """Where the base image cannot be built, the thirteen minutes of compiling are not spent."""
    be_root(monkeypatch)
    monkeypatch.setattr(binaries, "build", lambda: pytest.fail("the cluster's programs were compiled"))
    with pytest.raises(OwnCluster):
        target.local()
    programs.add("apt-get", {"indextargets*": "echo 'Ubuntu|jammy|jammy|jammy|main|http://a/'"})
    programs.add("apt-cache", {"*": "echo 'python3 | 3.10.4-0ubuntu2 | http://a jammy/main amd64 Packages'"})
    with pytest.raises(DevError, match=r"Ubuntu jammy has Python 3.10, and the images need 3.11 or newer"):
        target.local()


def test_a_cluster_that_was_just_started_gets_time_to_answer(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pseudoreal_dev.cluster.kubectl.POLL_SECONDS", 0.01)
    monkeypatch.setattr(in_containers, "ANSWER_SECONDS", 60)
    fakes.add(programs, "docker", "kind", "kubectl", "helm")
    later = '[ -e "$STATE/asked" ] && echo ok || { : > "$STATE/asked"; exit 1; }'
    programs.add("kubectl", {**fakes.KUBECTL, "*get --raw=/readyz*": later})
    target.choose()
    assert len([call for call in programs.calls("kubectl") if "readyz" in call]) == 2


@pytest.mark.parametrize("tool", ["kind", "k3d", "minikube"])
def test_a_cluster_that_does_not_answer_is_named_with_the_remedy(tool: str, programs: Programs) -> None:
    fakes.add(programs, "docker", tool, "kubectl", "helm")
    target.choose()
    refused = "Unable to connect to the server: dial tcp 127.0.0.1:43211: connect: connection refused"
    programs.add("kubectl", {"*readyz*": f"echo '{refused}' >&2; exit 1"})
    built = len([call for call in programs.calls("docker") if " build " in call])
    with pytest.raises(DevError, match=f"The {tool} cluster pseudoreal-demo exists, and does not answer") as error:
        target.choose()
    assert refused in str(error.value)
    assert "delete" in str(error.value)
    assert "docker start" in str(error.value)
    assert len([call for call in programs.calls("docker") if " build " in call]) == built


def test_a_stopped_kind_cluster_is_named_with_the_remedy(programs: Programs) -> None:
    """kind cannot read the kubeconfig of a node that is stopped."""
    fakes.add(programs, "docker", "kind", "kubectl", "helm")
    stopped = "ERROR: failed to get cluster internal kubeconfig: container pseudoreal-demo-control-plane is not running"
    programs.add("kind", {"get clusters": "echo pseudoreal-demo", "export *": f"echo '{stopped}' >&2; exit 1"})
    with pytest.raises(
        DevError, match=r"`kind delete cluster --name=pseudoreal-demo`; then `make demo` makes another"
    ) as error:
        target.choose()
    assert stopped in str(error.value)


def test_a_cluster_that_cannot_be_created_shows_the_log(programs: Programs) -> None:
    fakes.add(programs, "docker", "kind", "kubectl", "helm")
    programs.add("kind", {"create *": "echo 'ERROR: failed to create cluster: port is already allocated' >&2; exit 1"})
    with pytest.raises(DevError, match="port is already allocated"):
        target.choose()
    assert not [call for call in programs.calls("docker") if " build " in call]


def test_a_build_that_fails_shows_the_log(programs: Programs) -> None:
    fakes.add(programs, *EVERYTHING)
    failure = "ERROR: failed to solve: process /bin/sh -c pip install did not complete successfully: exit code: 1"
    programs.add("docker", {**fakes.DOCKER, "build *": f"echo '{failure}' >&2; exit 1"})
    with pytest.raises(DevError, match="docker ended with exit code 1") as error:
        target.choose()
    assert failure in str(error.value)
    assert not [call for call in programs.calls("kind") if "load" in call]


def test_a_build_that_another_builder_keeps_is_named(programs: Programs) -> None:
    """A builder of the driver docker-container leaves the image in its own cache, and warns only."""
    fakes.add(programs, *EVERYTHING)
    programs.add("docker", {**fakes.DOCKER, "build *": "echo 'WARNING: No output specified' >&2"})
    with pytest.raises(
        DevError, match=r"Docker has no image localhost/pseudoreal-operator:.*docker buildx use default"
    ):
        target.choose()


FULL = "write /var/lib/containerd/io.containerd.content.v1.content/ingest: no space left on device"


@pytest.mark.parametrize(
    ("tool", "pattern", "answer"),
    [
        ("kind", "load *", f"echo 'ERROR: failed to load image: {FULL}' >&2; exit 1"),
        # k3d and minikube end with exit code 0, and minikube is silent.
        ("k3d", "image import *", f"echo 'ERRO[0001] failed to import images in node: {FULL}' >&2"),
        ("minikube", "image ls *", "echo registry.k8s.io/pause:3.10"),
        ("docker", "image save *", f"echo '{FULL}' >&2; exit 1"),
    ],
)
def test_an_image_that_is_not_loaded_is_said_at_once(tool: str, pattern: str, answer: str, programs: Programs) -> None:
    runs = "kind" if tool == "docker" else tool
    fakes.add(programs, "docker", runs, "kubectl", "helm")
    known = {"docker": fakes.DOCKER, **fakes.TOOLS}[tool]
    programs.add(tool, {**{name: said for name, said in known.items() if name != pattern}, pattern: answer})
    with pytest.raises(DevError) as error:
        target.choose()
    first, *rest = str(error.value).splitlines()
    assert f"is not in the {runs} cluster pseudoreal-demo." in first
    assert "docker system df" in rest[-1]
    assert tool == "minikube" or FULL in str(error.value)
    assert not list(Path(os.environ["PSEUDOREAL_CACHE"], "images").glob("*.tar"))


class TestANamedContext:
    """KUBE_CONTEXT names it; what it names is taken whatever else is there."""

    @pytest.fixture(autouse=True)
    def there(self, programs: Programs) -> None:
        fakes.add(programs, *EVERYTHING)

    def test_named_images_are_taken_as_they_are(self, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("KUBE_CONTEXT", "prod"), ("OPERATOR_IMAGE", "r/o:1"), ("TRAINER_IMAGE", "r/t:1")):
            monkeypatch.setenv(name, value)
        found = target.choose()
        assert (found.operator_image, found.trainer_image) == ("r/o:1", "r/t:1")
        assert found.ending.startswith("helm --kube-context=prod uninstall")
        assert programs.calls() == ["kubectl --context=prod get --raw=/readyz --request-timeout=10s"]

    @pytest.mark.parametrize(("context", "tool"), [("kind-mine", "kind"), ("k3d-mine", "k3d"), ("mine", "minikube")])
    def test_a_context_of_kind_minikube_or_k3d_needs_no_images(
        self, context: str, tool: str, programs: Programs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are built, and loaded into that cluster and no other."""
        programs.add("minikube", {**fakes.MINIKUBE, "profile list*": """echo '{"valid":[{"Name":"mine"}]}'"""})
        monkeypatch.setenv("KUBE_CONTEXT", context)
        found = target.choose()
        archives = [f"{os.environ['PSEUDOREAL_CACHE']}/images/{image}.tar" for image in ("operator", "trainer")]
        loaded = [LOADED[tool].format(archive=archive, cluster="mine") for archive in archives]
        assert changes(programs, tool) == loaded
        assert found.ending.startswith(f"helm --kube-context={context} uninstall")
        assert found.kubernetes.kubectl == ("kubectl", f"--context={context}")

    def test_all_that_its_loading_lacks_is_told(self, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KUBE_CONTEXT", "kind-mine")
        for name in ("kind", "helm", "docker"):
            (programs.folder / name).unlink()
        with pytest.raises(DevError) as refused:
            target.choose()
        assert str(refused.value).splitlines() == [
            "The demo cannot use the context kind-mine yet:",
            "- helm is not on the PATH. Install it: https://helm.sh/docs/intro/install",
            "- kind is not on the PATH, which would load the images. Install kind",
            "- docker is not on the PATH. Install Docker",
        ]

    @pytest.mark.parametrize(
        ("named", "said"),
        [
            ({}, ["OPERATOR_IMAGE is not set. Build", "TRAINER_IMAGE is not set. Build"]),
            ({"TRAINER_IMAGE": "r/t:1"}, ["OPERATOR_IMAGE is not set. Build"]),
            (
                {"OPERATOR_IMAGE": "localhost:5000/o", "TRAINER_IMAGE": "r/t@sha256:12"},
                ["OPERATOR_IMAGE is localhost:5000/o, without a tag. Set OPERATOR_IMAGE=registry/name:tag"],
            ),
        ],
    )
    def test_another_context_needs_both_images(
        self, named: dict[str, str], said: list[str], programs: Programs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in {"KUBE_CONTEXT": "prod", **named}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(DevError) as refused:
            target.choose()
        _, *lines = str(refused.value).splitlines()
        assert [line[: len(wanted) + 2] for line, wanted in zip(lines, said, strict=True)] == [
            f"- {one}" for one in said
        ]
        assert [call for call in programs.calls() if "profile list" not in call] == []

    def test_one_that_does_not_answer_is_told_before_the_build(
        self, programs: Programs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(target, "ANSWER_SECONDS", 0)
        monkeypatch.setenv("KUBE_CONTEXT", "kind-gone")
        programs.add("kubectl", {"*": """echo 'error: context "kind-gone" does not exist' >&2; exit 1"""})
        with pytest.raises(DevError, match=r"KUBE_CONTEXT=kind-gone does not answer.*\n.*does not exist"):
            target.choose()
        assert not [call for call in programs.calls("docker") if " build " in call]


@pytest.mark.parametrize(
    ("image", "wanted"),
    [
        (
            "localhost:5000/o:1",
            ["--set=operator.image.repository=localhost:5000/o", "--set-string=operator.image.tag=1"],
        ),
        ("r/o@sha256:12", ["--set=operator.image.repository=r/o", "--set-string=operator.image.digest=sha256:12"]),
        ("r/o:1@sha256:12", ["--set=operator.image.repository=r/o", "--set-string=operator.image.digest=sha256:12"]),
    ],
)
def test_the_chart_is_given_a_tag_or_a_digest(image: str, wanted: list[str], programs: Programs) -> None:
    fakes.add(programs, "kubectl", "helm")
    chart.install(Kubernetes.of_context("x"), image, "r/t:1")
    (call,) = programs.calls("helm")
    assert all(value in call.split() for value in wanted)
