"""Digest of the base image, queried by the real skopeo from a registry on loopback."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pseudoreal_dev.images import pin
from pseudoreal_dev.machine import packages
from pseudoreal_dev.machine.shell import CommandFailed

pytestmark = pytest.mark.integration

OLD = f"sha256:{'0' * 64}"
CONFIG = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}}).encode()
OCI = "application/vnd.oci.image"


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _descriptor(kind: str, content: bytes) -> dict[str, object]:
    return {"mediaType": f"{OCI}.{kind}.v1+json", "digest": digest_of(content), "size": len(content)}


MANIFEST = json.dumps(
    {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": _descriptor("config", CONFIG),
        "layers": [],
    }
).encode()
INDEX = json.dumps(
    {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.index.v1+json",
        "manifests": [
            _descriptor("manifest", MANIFEST) | {"platform": {"architecture": machine, "os": "linux"}}
            for machine in ("amd64", "arm64")
        ],
    }
).encode()
SERVED = {
    "/v2/": ("application/json", b"{}"),
    "/v2/python/manifests/3.12-slim": (f"{OCI}.index.v1+json", INDEX),
    f"/v2/python/manifests/{digest_of(MANIFEST)}": (f"{OCI}.manifest.v1+json", MANIFEST),
    f"/v2/python/blobs/{digest_of(CONFIG)}": ("application/octet-stream", CONFIG),
    "/v2/python/tags/list": ("application/json", b'{"name": "python", "tags": ["3.12-slim"]}'),
}


class Registry(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        kind, content = SERVED.get(self.path.partition("?")[0], ("application/json", b'{"errors": []}'))
        self.send_response(200 if self.path.partition("?")[0] in SERVED else 404)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    packages.install_missing({"skopeo": "skopeo"})
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


def test_the_digest_of_all_platforms_is_written(registry: str, tmp_path: Path) -> None:
    file, image = tmp_path / "Dockerfile", f"{registry}/python:3.12-slim"
    file.write_text(f"# First.\nARG BASE_IMAGE={image}@{OLD}\n\nFROM ${{BASE_IMAGE}}\n")
    wanted = f"{image}@{digest_of(INDEX)}"
    for given in (None, image):
        assert pin.write(given, file, options=("--tls-verify=false",)) == wanted
        assert file.read_text() == f"# First.\nARG BASE_IMAGE={wanted}\n\nFROM ${{BASE_IMAGE}}\n"


def test_the_file_stays_if_the_tag_does_not_exist(registry: str, tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text(before := f"ARG BASE_IMAGE=python:3@{OLD}\n")
    with pytest.raises(CommandFailed, match="skopeo inspect"):
        pin.write(f"{registry}/python:none", file, options=("--tls-verify=false",))
    assert file.read_text() == before
