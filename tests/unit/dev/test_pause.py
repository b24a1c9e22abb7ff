"""The image that holds a pod's namespaces is for the machine's own architecture."""

import json
import platform
import tarfile
from pathlib import Path

import pytest
from pseudoreal_dev.cluster import pause
from pseudoreal_dev.cluster.binaries import Binaries
from pseudoreal_dev.cluster.containerd import Containerd


@pytest.mark.parametrize(("machine", "wanted"), [("x86_64", "amd64"), ("aarch64", "arm64"), ("riscv64", "riscv64")])
def test_the_pause_image_is_for_this_architecture(
    machine: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = tmp_path / "imported.tar"
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(Containerd, "names_of", lambda *_: [])
    monkeypatch.setattr(Containerd, "client", lambda *_: ["/bin/sh", "-c", f"cat > {imported}"])
    (tmp_path / "pause").write_bytes(b"program")
    pause.load(Containerd(tmp_path, tmp_path, None), Binaries(tmp_path))  # type: ignore[arg-type]
    with tarfile.open(imported) as archive:
        configuration = archive.extractfile("config.json")
        assert configuration
        assert json.load(configuration)["architecture"] == wanted
