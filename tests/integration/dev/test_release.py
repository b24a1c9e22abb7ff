"""A release of the commit that is checked out: the same bytes each time, and what is in it works with others' tools."""

import json
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from pseudoreal_dev.cluster import binaries
from pseudoreal_dev.cluster.control_plane import ControlPlane
from pseudoreal_dev.machine import paths, version
from pseudoreal_dev.release import manifests, oci_images, release
from pseudoreal_dev.release.oci_images import Built, Variant
from pseudoreal_dev.release.release import Wishes

from tests.support.chart import KUBE_VERSION, find, helm
from tests.support.kubectl import Kubectl
from tests.support.patience import wait_for

pytestmark = pytest.mark.integration

REGISTRY = "registry.example/team"
DIGESTS = {variant: f"sha256:{number:064x}" for number, variant in enumerate(Variant)}
NAME = version.semantic(version.read())


def sbom(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "operator.cdx.json").write_text("{}")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Function for making a release of a clone of the commit; `published`: with images that are not really built."""
    work = tmp_path_factory.mktemp("release")
    clone = work / "clone"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(paths.REPOSITORY), str(clone)], check=True)

    def made(name: str, *, published: bool) -> Path:
        patch = pytest.MonkeyPatch()

        def build(variant: Variant, _: object, folder: Path) -> Built:
            return Built(folder / f"{variant}.tar", DIGESTS[variant], ["linux/amd64"], {"linux/arm64": "no emulator"})

        with patch.context() as patched:
            patched.setattr(release, "SBOMS", work / "sbom")
            patched.setattr(release, "_helm", lambda: binaries.build().path("helm"))
            patched.setattr(oci_images, "build", build)
            sbom(work / "sbom")
            wishes = Wishes(str(version.read()), REGISTRY if published else "", [*Variant] if published else [])
            return release.make(wishes, clone, work / name)

    return made


@pytest.fixture(scope="module")
def unpublished(make: Callable[..., Path]) -> Path:
    return make("unpublished", published=False)


@pytest.fixture(scope="module")
def published(make: Callable[..., Path]) -> Path:
    return make("published", published=True)


def test_the_same_commit_gives_the_same_bytes(unpublished: Path, make: Callable[..., Path]) -> None:
    again = make("again", published=False)
    assert (again / release.SUMS).read_text() == (unpublished / release.SUMS).read_text()
    done = subprocess.run(["sha256sum", "--check", "--strict", release.SUMS], cwd=again, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    listed = {line.split("  ", 1)[1] for line in (again / release.SUMS).read_text().splitlines()}
    assert listed == {path.name for path in again.iterdir()} - {release.SUMS}
    assert listed >= {release.NOTES, release.MANIFEST, "install.yaml", "kustomization.yaml", "sbom-operator.cdx.json"}
    assert {f"pseudoreal-{NAME}.tgz", f"pseudoreal-{NAME}.chart.oci.tar", "kubectl-pseudoreal.tar.gz"} <= listed
    assert (
        len(
            [
                name
                for name in listed
                if name.endswith(("-py3-none-any.whl", ".dev0.tar.gz", f"{version.read()}.tar.gz"))
            ]
        )
        == 2
    )


def test_what_is_not_in_a_release_is_named(unpublished: Path, published: Path) -> None:
    omitted = json.loads((unpublished / release.MANIFEST).read_text())["omissions"]
    assert omitted.keys() == {
        *(f"image {variant}" for variant in Variant),
        "images in the charts and in install.yaml",
        "manifest for krew",
    }
    for part, why in omitted.items():
        assert f"not in it: {part}: {why}" in release.listing(unpublished)
    manifest = json.loads((published / release.MANIFEST).read_text())
    assert manifest["omissions"].keys() == {
        *(f"image {variant} for linux/arm64" for variant in Variant),
        "manifest for krew",
    }
    assert {variant: image["digest"] for variant, image in manifest["images"].items()} == DIGESTS
    assert manifest["images"]["trainer-cpu"]["publishedAs"] == f"{REGISTRY}/pseudoreal-trainer:{NAME}-cpu"


def test_a_published_chart_needs_no_values(published: Path, unpublished: Path) -> None:
    text = helm("template", "pseudoreal", str(published / f"pseudoreal-{NAME}.tgz"), KUBE_VERSION)
    documents = [document for document in yaml.safe_load_all(text) if document]
    (container,) = find(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"{REGISTRY}/pseudoreal-operator@{DIGESTS[Variant.OPERATOR]}"
    trainer = f"{REGISTRY}/pseudoreal-trainer@{DIGESTS[Variant.TRAINER]}"
    assert {"name": "PSEUDOREAL_TRAINER_IMAGE", "value": trainer} in container["env"]
    assert f'image: "{trainer}"' in helm(
        "template", "llama", str(published / f"pseudoreal-llama-{NAME}.tgz"), KUBE_VERSION
    )
    with pytest.raises(AssertionError, match=r"operator\.image\.repository is"):
        helm("template", "pseudoreal", str(unpublished / f"pseudoreal-{NAME}.tgz"), KUBE_VERSION)


@pytest.fixture
def registry(published: Path, tmp_path: Path) -> Iterator[str]:
    """A registry on loopback that serves the operator's chart from its OCI archive."""
    with tarfile.open(published / f"pseudoreal-{NAME}.chart.oci.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    (listed,) = json.loads((tmp_path / "index.json").read_text())["manifests"]
    tag = listed["annotations"]["org.opencontainers.image.ref.name"]

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2].removeprefix("sha256:")
            blob = tmp_path / "blobs" / "sha256" / (listed["digest"].removeprefix("sha256:") if name == tag else name)
            found = self.path.startswith("/v2/charts/pseudoreal/") and blob.is_file()
            content = blob.read_bytes() if found else b"{}"
            self.send_response(200 if found or self.path == "/v2/" else 404)
            is_manifest = "/manifests/" in self.path
            self.send_header("Content-Type", listed["mediaType"] if is_manifest else "application/octet-stream")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"oci://127.0.0.1:{server.server_port}/charts/pseudoreal"
    server.shutdown()


def test_helm_pulls_the_chart_from_a_registry(registry: str, published: Path, tmp_path: Path) -> None:
    helm("pull", registry, f"--version={NAME}", "--plain-http", f"--destination={tmp_path}")
    name = f"pseudoreal-{NAME}.tgz"
    assert (tmp_path / name).read_bytes() == (published / name).read_bytes()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """kubectl for an API server on which nothing is installed."""
    with ControlPlane(tmp_path_factory.mktemp("fresh")) as running:
        yield Kubectl(running.kubeconfig)


def test_a_cluster_takes_install_yaml(fresh: Kubectl, published: Path, tmp_path: Path) -> None:
    """There are no nodes, so the operator's pods are made and wait."""
    file = published / "install.yaml"
    apply = ("apply", "--server-side", "-f", str(file))
    wait_for("the definition's establishment", lambda: fresh(*apply).returncode == 0, lambda: fresh(*apply).stderr)
    again = fresh.said(*apply)
    assert again.splitlines()[:2] == [
        "namespace/pseudoreal serverside-applied",
        "customresourcedefinition.apiextensions.k8s.io/pseudorealjobs.pseudoreal.dev serverside-applied",
    ]
    for kind in ("validatingadmissionpolicy", "validatingadmissionpolicybinding"):
        assert f"{kind}.admissionregistration.k8s.io/pseudorealjobs.pseudoreal.dev serverside-applied" in again
    assert "kind: Secret" not in file.read_text(), "a key in a published file is no secret"

    def pods() -> list[Any]:
        return list(json.loads(fresh.said("get", "pods", "--namespace=pseudoreal", "--output=json"))["items"])

    wait_for("the operator's pods", lambda: len(pods()) == 2)
    commands = [line.removeprefix("#   ") for line in file.read_text().splitlines() if line.startswith("#   ")]
    script = "\n".join(commands[1:])
    kubectl = f'kubectl() {{ "{binaries.build().path("kubectl")}" --kubeconfig="{fresh.kubeconfig}" "$@"; }}'
    subprocess.run(["bash", "-euc", f"{kubectl}\n{script}"], cwd=tmp_path, check=True, capture_output=True)
    secret = json.loads(fresh.said("get", "secret", manifests.SECRET, "--namespace=pseudoreal", "--output=json"))
    assert {*secret["data"]} == {"tls.crt", "tls.key", "ca.crt"}
    verify = ["openssl", "verify", "-CAfile", "tls.crt", "-verify_hostname", "pseudoreal.pseudoreal.svc", "tls.crt"]
    assert subprocess.run(verify, cwd=tmp_path, capture_output=True, text=True).stdout == "tls.crt: OK\n"


@pytest.mark.parametrize("kind", ["published", "unpublished"])
def test_the_kustomization_changes_both_images(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder: Path = request.getfixturevalue(kind)
    text = (folder / "kustomization.yaml").read_text()
    (tmp_path / "install.yaml").symlink_to(folder / "install.yaml")

    def images(content: str) -> list[str]:
        (tmp_path / "kustomization.yaml").write_text(content)
        command = [str(binaries.build().path("kubectl")), "kustomize", "--load-restrictor=LoadRestrictionsNone"]
        done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=True)
        loader = yaml.CSafeLoader
        deployment = next(d for d in yaml.load_all(done.stdout, loader) if d["kind"] == "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        trainer = next(one["value"] for one in container["env"] if one["name"] == "PSEUDOREAL_TRAINER_IMAGE")
        return [container["image"], trainer]

    prefix = REGISTRY if kind == "published" else manifests.UNPUBLISHED
    before = images(text)
    assert all(image.startswith(f"{prefix}/pseudoreal-") for image in before)
    after = images(
        text.replace(f"newName: {prefix}", "newName: mine.example").replace(f'value: "{prefix}', 'value: "mine.example')
    )
    assert after == [image.replace(prefix, "mine.example") for image in before]
