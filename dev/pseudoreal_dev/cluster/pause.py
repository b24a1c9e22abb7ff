"""The pause image: a single static program that holds a pod's namespaces open."""

import hashlib
import io
import json
import platform
import subprocess
import tarfile

from pseudoreal_dev.cluster.binaries import Binaries
from pseudoreal_dev.cluster.containerd import Containerd
from pseudoreal_dev.machine.shell import CommandFailed

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""The kernel's name of an architecture -> its name in images, where the names differ."""


def image(binaries: Binaries) -> str:
    """Return the name of the image; its tag changes with the program."""
    return f"localhost/pseudoreal-pause:{binaries.folder.name}"


def load(containerd: Containerd, binaries: Binaries) -> None:
    """Import the image into containerd, unless it is there."""
    name = image(binaries)
    if name in containerd.names_of("images"):
        return
    archive = _archive(name, binaries.path("pause").read_bytes())
    done = subprocess.run(containerd.client("images", "import", "-"), input=archive, capture_output=True)
    if done.returncode != 0:
        raise CommandFailed(f"containerd refused the pause image: {done.stderr.decode(errors='replace')}")


def _archive(name: str, program: bytes) -> bytes:
    """Return a `docker save` archive of an image with one layer of one file."""
    layer = _tar({"pause": program})
    configuration = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Entrypoint": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    files = {
        "config.json": json.dumps(configuration).encode(),
        "layer.tar": layer,
        "manifest.json": json.dumps(manifest).encode(),
    }
    return _tar(files)


def _tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
