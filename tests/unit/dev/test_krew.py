"""The plugin as installed by krew: the manifest checked by krew's own rules, and the archive by running it."""

import hashlib
import io
import os
import re
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pseudoreal_dev.krew import plugin
from pseudoreal_dev.machine import paths

Json = dict[str, Any]

URL, HOMEPAGE = "https://example.com/v0.3.0/kubectl-pseudoreal.tar.gz", "https://example.com"
_FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"version", "shortDescription", "description", "caveats", "homepage", "platforms"},
    "platform": {"uri", "sha256", "selector", "files", "license", "bin"},
}
"""Fields of krew's types (pkg/index/types.go)."""
_SEMVER = re.compile(r"v(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")


def faults(manifest: Json) -> Iterator[str]:
    """Yield everything that krew would reject (internal/index/validation/validate.go), and fields unknown to krew."""
    yield from manifest.keys() - _FIELDS[""]
    if (manifest["apiVersion"], manifest["kind"]) != ("krew.googlecontainertools.github.com/v1alpha2", "Plugin"):
        yield "apiVersion, kind"
    if not re.fullmatch(r"[\w-]+", manifest["metadata"]["name"]):
        yield "name"
    spec = manifest["spec"]
    yield from spec.keys() - _FIELDS["spec"]
    if not spec.get("shortDescription") or re.search(r"[\r\n]", spec["shortDescription"]):
        yield "shortDescription"
    if not _SEMVER.fullmatch(spec.get("version", "")):
        yield "version"
    if not spec.get("platforms"):
        yield "platforms"
    for platform in spec.get("platforms") or []:
        yield from _faults_of_platform(platform)


def _faults_of_platform(platform: Json) -> Iterator[str]:
    yield from platform.keys() - _FIELDS["platform"]
    yield from (name for name in ("uri", "bin") if not platform.get(name))
    if not re.fullmatch("[a-f0-9]{64}", platform.get("sha256", "")):
        yield "sha256"
    if any(not one.get("from") or not one.get("to") for one in platform.get("files", [{}])) and "files" in platform:
        yield "files"
    selector = platform.get("selector") or {}
    keys = [*selector.get("matchLabels", {}), *(one["key"] for one in selector.get("matchExpressions", []))]
    if not keys or not {*keys} <= {"os", "arch"}:
        yield "selector"


@pytest.fixture(scope="module")
def packed() -> bytes:
    return plugin.archive()


@pytest.fixture(scope="module")
def installed(packed: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the unpacked archive and with the link that krew would create in a folder of PATH."""
    folder = tmp_path_factory.mktemp("krew")
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(folder / "store", filter="data")
    (folder / "bin").mkdir()
    (folder / "bin" / "kubectl-pseudoreal").symlink_to(folder / "store" / _bin(packed))
    return folder


def _bin(packed: bytes) -> str:
    return str(plugin.manifest(URL, HOMEPAGE, packed)["spec"]["platforms"][0]["bin"])


def call(installed: Path, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    usual = {"PATH": f"{installed / 'bin'}:/usr/bin:/bin", "HOME": str(installed)}
    program = str(installed / "bin" / "kubectl-pseudoreal")
    return subprocess.run([program, *words], env=usual | environment, capture_output=True, text=True, timeout=120)


def test_krew_takes_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "FOLDER", tmp_path)
    plugin.make(URL, HOMEPAGE)
    manifest = yaml.safe_load((tmp_path / plugin.MANIFEST).read_text())
    assert [*faults(manifest)] == []
    assert manifest["metadata"]["name"] == "pseudoreal"
    (platform,) = manifest["spec"]["platforms"]
    assert platform["sha256"] == hashlib.sha256((tmp_path / plugin.ARCHIVE).read_bytes()).hexdigest()
    assert platform["uri"] == URL


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("apiVersion", "v1"),
        ("metadata.name", "pseudo real"),
        ("spec.shortDescription", "two\nlines"),
        ("spec.version", "0.3.0"),
        ("spec.platforms", []),
        ("spec.platform", []),
        ("spec.platforms.0.sha256", "abc"),
        ("spec.platforms.0.bin", ""),
        ("spec.platforms.0.selector", {"matchLabels": {"cpu": "x"}}),
        ("spec.platforms.0.selector", None),
    ],
)
def test_what_krew_refuses_is_seen(path: str, value: object, packed: bytes) -> None:
    manifest: Any = plugin.manifest(URL, HOMEPAGE, packed)
    *way, last = path.split(".")
    place = manifest
    for step in way:
        place = place[int(step)] if step.isdecimal() else place[step]
    place[last] = value
    assert [*faults(manifest)] != []


def test_the_archive_is_the_same_whenever_it_is_made(packed: bytes) -> None:
    assert plugin.archive() == packed
    # The modification time in the gzip header (RFC 1952).
    assert packed[4:8] == bytes(4)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert {(member.uid, member.mtime, member.uname) for member in tar} == {(0, 0, "")}
        assert {member.name for member in tar if member.mode & stat.S_IXUSR} == {_bin(packed)}


def test_the_archive_has_the_licence_and_its_notice(installed: Path) -> None:
    for name in ("LICENSE", "NOTICE"):
        assert (installed / "store" / name).read_bytes() == (paths.REPOSITORY / name).read_bytes()


def test_it_runs_through_the_link_that_krew_makes(installed: Path) -> None:
    done = call(installed, "validate", "-", PSEUDOREAL_PYTHON=sys.executable, PYTHONSAFEPATH="1")
    assert (done.returncode, done.stderr) == (78, "standard input holds no object of kind PseudoRealJob\n")


def test_it_is_its_own_code_that_runs(installed: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$PYTHONPATH" "$@"\n')
    python.chmod(0o755)
    library = os.path.realpath(installed / "store" / "lib")
    done = call(installed, "get", PSEUDOREAL_PYTHON=str(python))
    assert done.stdout == f"{library} -m pseudoreal_trainer.cli.command get\n"
    done = call(installed, "get", PSEUDOREAL_PYTHON=str(python), PYTHONPATH="/mine")
    assert done.stdout.startswith(f"{library}:/mine ")


def test_without_python_it_says_what_is_missing(installed: Path, tmp_path: Path) -> None:
    for name in ("dirname", "readlink", "sh"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    done = call(installed, "get", PATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == (
        "kubectl pseudoreal: it needs Python 3.11 or newer as python3; install it, or name another one in"
        " PSEUDOREAL_PYTHON\n"
    )


def test_packages_are_installed_once(installed: Path, tmp_path: Path) -> None:
    """A fake python3 records its calls, and creates virtual environments that contain itself."""
    calls = tmp_path / "calls"
    fake = tmp_path / "python3"
    fake.write_text(
        f'#!/bin/sh\necho "$*" >> {calls}\n'
        'if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi\n'
        'if [ "$2" = pip ] && [ -n "${NO_INDEX:-}" ]; then exit 1; fi\n'
    )
    fake.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    failed = call(installed, "get", PATH=path, NO_INDEX="1")
    assert (failed.returncode, "they could not be installed" in failed.stderr) == (1, True)
    for _ in range(2):
        assert call(installed, "get", "-A", PATH=path).returncode == 0
    said = calls.read_text().splitlines()
    assert sum(line.startswith("-m pip install") for line in said) == 2
    assert said[-2:] == ["-m pseudoreal_trainer.cli.command get -A"] * 2
    assert f"-r {os.path.realpath(installed / 'store')}/requirements.txt" in said[2]
