"""What a release refuses, how it is cut, and archives that depend on their contents alone."""

import gzip
import io
import json
import os
import shutil
import subprocess
import tarfile
from datetime import date
from pathlib import Path
from typing import NoReturn

import pytest
import yaml
from packaging.version import Version
from pseudoreal_dev.cluster import binaries
from pseudoreal_dev.machine import paths
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.release import archives, changelog, charts, oci_images, release
from pseudoreal_dev.release.oci_images import Source, Variant
from pseudoreal_dev.release.release import Wishes

CHANGELOG = "# Changelog\n\n## Unreleased\n\n### Added\n\n- New.\n\n## 0.3.0\n\n- Old.\n"
DIGEST = f"sha256:{'a' * 64}"


def git(folder: Path, *words: str) -> str:
    author = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    command = ["git", "-C", str(folder), *author, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit, whose version is 0.4.0.dev0."""
    folder = tmp_path / "repository"
    (folder / "charts" / "one").mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "one"\nversion = "0.4.0.dev0"\n')
    (folder / "charts" / "one" / "Chart.yaml").write_text("version: 0.4.0-dev.0\nappVersion: 0.4.0-dev.0\n")
    (folder / "Dockerfile").write_text("ARG VERSION=0.4.0-dev.0\n")
    (folder / "CHANGELOG.md").write_text(CHANGELOG)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "all")
    return folder


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        (Wishes(), r"version under development\. Ask for it with VERSION=0\.4\.0\.dev0, or .*make cut VERSION=0\.4\.0"),
        (
            Wishes(version="0.4.0"),
            r"VERSION is 0\.4\.0, and pyproject\.toml says 0\.4\.0\.dev0; `make cut VERSION=0\.4\.0`",
        ),
        (Wishes(version="soon"), r"VERSION is 'soon', which is no version"),
        (Wishes(version="0.4.0.dev0", registry="https://registry.example"), "IMAGES is 'https://registry.example'"),
        (Wishes(version="0.4.0.dev0", registry="registry.example/team/"), "host and path alone"),
        (Wishes(version="0.4.0.dev0", registry="registry.example/team:1"), "host and path alone"),
        (Wishes(version="0.4.0.dev0", krew_url="https://example.com/a.tar.gz"), "URL and HOMEPAGE belong together"),
    ],
)
def test_a_release_refuses_what_does_not_fit(wishes: Wishes, says: str, repository: Path, tmp_path: Path) -> None:
    with pytest.raises(DevError, match=says):
        release.make(wishes, repository, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize("name", ["registry.example", "registry.example:5000/team/a_b", "localhost:5000", "account"])
def test_registries_are_taken(name: str) -> None:
    assert release._REGISTRY.fullmatch(name)


@pytest.mark.parametrize("new", [True, False])
def test_a_release_is_that_of_a_commit(new: bool, repository: Path, tmp_path: Path) -> None:
    (repository / ("new.txt" if new else "CHANGELOG.md")).write_text("changed")
    with pytest.raises(DevError, match=r"these files differ from it: (new\.txt|CHANGELOG\.md)"):
        release.make(Wishes(version="0.4.0.dev0"), repository, tmp_path / "dist")


def test_a_chart_of_another_version_is_refused(repository: Path, tmp_path: Path) -> None:
    (repository / "charts" / "one" / "Chart.yaml").write_text("version: 0.3.0\n")
    git(repository, "commit", "--all", "--quiet", "--message", "an old chart")
    with pytest.raises(DevError, match=r"charts/one/Chart\.yaml: another version than pyproject\.toml's 0\.4\.0\.dev0"):
        release.make(Wishes(version="0.4.0-dev.0"), repository, tmp_path / "dist")


def test_a_release_is_made_in_the_cache_and_replaces_the_last_one(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of two architectures fill a /tmp that is in memory."""
    monkeypatch.setenv("PSEUDOREAL_CACHE", str(tmp_path / "cache"))
    folders = []

    def fill(made: release._Release, _: Wishes) -> None:
        folders.append(made.folder)
        (made.folder / "new").touch()

    monkeypatch.setattr(release, "_fill", fill)
    dist = tmp_path / "dist"
    for _ in range(2):
        release.make(Wishes(version="0.4.0.dev0"), repository, dist)
    assert all(folder.is_relative_to(tmp_path / "cache") for folder in folders)
    assert [path.name for path in dist.iterdir()] == ["new"]
    assert list((tmp_path / "cache").iterdir()) == []
    elsewhere = tmp_path / "elsewhere"
    dist.rename(elsewhere)
    dist.symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic link"):
        release.make(Wishes(version="0.4.0.dev0"), repository, dist)
    assert [path.name for path in elsewhere.iterdir()] == ["new"]


def test_only_helm_is_built_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, ...]] = []

    def build(*names: str) -> binaries.Binaries:
        built.append(names)
        return binaries.Binaries(tmp_path)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(binaries, "build", build)
    assert release._helm() == tmp_path / "helm"
    assert built == [("helm",)]


def test_cutting_a_release_dates_the_changelog_and_stamps_everything(repository: Path) -> None:
    changelog.cut("0.4.0", date(2026, 12, 1), repository)
    assert (repository / "CHANGELOG.md").read_text() == CHANGELOG.replace("Unreleased", "0.4.0 (2026-12-01)")
    assert 'version = "0.4.0"' in (repository / "pyproject.toml").read_text()
    assert (repository / "charts" / "one" / "Chart.yaml").read_text() == "version: 0.4.0\nappVersion: 0.4.0\n"
    assert (repository / "Dockerfile").read_text() == "ARG VERSION=0.4.0\n"
    assert changelog.notes((repository / "CHANGELOG.md").read_text(), Version("0.4.0")) == (
        "# pseudoreal 0.4.0\n\n### Added\n\n- New.\n"
    )


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("0.4.0.dev1", "a version under development"),
        ("0.3.9", r"pyproject\.toml says 0\.4\.0\.dev0 already"),
        ("four", "is no version"),
        ("0.4", "is no version"),
        ("0.4.0.post1", "is no version"),
        ("1!0.4.0", "is no version"),
        ("0.4.0+mine", "is no version"),
    ],
)
def test_no_other_version_is_cut(wanted: str, says: str, repository: Path) -> None:
    with pytest.raises(DevError, match=says):
        changelog.cut(wanted, date(2026, 12, 1), repository)
    assert git(repository, "status", "--porcelain") == ""


def test_a_release_without_news_is_not_cut(repository: Path) -> None:
    (repository / "CHANGELOG.md").write_text("# Changelog\n\n## 0.3.0\n")
    with pytest.raises(DevError, match="no heading '## Unreleased'"):
        changelog.cut("0.4.0", date(2026, 12, 1), repository)


def test_notes_are_the_section_of_the_version() -> None:
    assert changelog.notes(CHANGELOG, Version("0.4.0.dev0")) == "# pseudoreal 0.4.0-dev.0\n\n### Added\n\n- New.\n"
    assert changelog.notes(CHANGELOG, Version("0.3.0")) == "# pseudoreal 0.3.0\n\n- Old.\n"
    with pytest.raises(DevError, match=r"no section '0\.4\.0' with text"):
        changelog.notes(CHANGELOG, Version("0.4.0"))
    with pytest.raises(DevError, match="no section 'Unreleased' with text"):
        changelog.notes("## Unreleased\n\n## 0.3.0\n\n- Old.\n", Version("0.4.0.dev0"))


def test_links_of_notes_lead_to_the_files_of_the_release() -> None:
    """A page of releases is no folder with the documents beside it."""
    text = "## 0.4.0\n\n- A [b](docs/b.md#c), [d](CITATION.cff), [e](https://example.com/e).\n"
    files = "https://example.com/o/n/blob/abc"
    found = changelog.notes(text, Version("0.4.0"), files)
    assert f"[b]({files}/docs/b.md#c), [d]({files}/CITATION.cff), [e](https://example.com/e)" in found


def zipped(files: dict[str, str], time: int) -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=time) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.uname = len(text), time, f"user {time}"
            tar.addfile(entry, io.BytesIO(text.encode()))
    return packed.getvalue()


def test_a_packed_archive_tells_nothing_of_its_making() -> None:
    files = {"b/Chart.yaml": "name: b", "b/a.txt": "a"}
    first, second = (archives.repack(zipped(files, time), 7) for time in (1, 2))
    assert first == second
    with tarfile.open(fileobj=io.BytesIO(first)) as tar:
        assert [(one.name, one.mtime, one.uname) for one in tar] == [("b/Chart.yaml", 7, ""), ("b/a.txt", 7, "")]
    assert archives.repack(zipped(files | {"b/a.txt": "c"}, 1), 7) != first


def test_an_archive_of_a_folder_tells_nothing_of_its_making(tmp_path: Path) -> None:
    made = []
    for time, order in ((1, "ab"), (2, "ba")):
        folder = tmp_path / order
        folder.mkdir()
        for name in order:
            (folder / name).write_text(name)
            os.utime(folder / name, (time, time))
        archives.tar_folder(folder, tmp_path / f"{order}.tar", 7)
        made.append((tmp_path / f"{order}.tar").read_bytes())
    assert made[0] == made[1]


def test_published_images_become_the_defaults_of_the_charts(tmp_path: Path) -> None:
    images = {"operator": f"registry.example/pseudoreal-operator@{DIGEST}", "trainer": f"registry.example/t@{DIGEST}"}
    for name in ("pseudoreal", "pseudoreal-llama"):
        shutil.copytree(paths.REPOSITORY / "charts" / name, tmp_path / name)
        charts.name_images(tmp_path / name, images)
        text, readme = (tmp_path / name / "values.yaml").read_text(), (tmp_path / name / "README.md").read_text()
        assert "ublished yet" not in text + readme, "it is published now"
        assert "REGISTRY" not in readme
    values = yaml.safe_load((tmp_path / "pseudoreal" / "values.yaml").read_text())
    image = {"repository": "registry.example/pseudoreal-operator", "tag": "", "digest": DIGEST}
    assert values["operator"]["image"] == image | {"pullPolicy": "IfNotPresent"}
    assert values["trainer"]["image"]["repository"] == "registry.example/t"
    before = yaml.safe_load((paths.REPOSITORY / "charts/pseudoreal/values.yaml").read_text())
    for part in ("operator", "trainer"):
        before[part]["image"] = values[part]["image"]
    assert values == before, "nothing else changed"
    assert yaml.safe_load((tmp_path / "pseudoreal-llama" / "values.yaml").read_text())["image"] == images["trainer"]
    about = yaml.safe_load((tmp_path / "pseudoreal" / "Chart.yaml").read_text())
    assert {
        one["name"]: one["image"] for one in yaml.safe_load(about["annotations"]["artifacthub.io/images"])
    } == images


BUILDAH = """#!/bin/sh
echo "$*" >>{log}
case "$*" in
  *"bud "*{fails}*) echo "no such wheel" >&2; exit 1 ;;
  *" inspect "*) echo {digest} ;;
  *"images --noheading"*) echo {base} ;;
  *"manifest push"*)
    for last in "$@"; do :; done
    layout=$(echo "$last" | cut -d: -f2)
    mkdir -p "$layout/blobs"; echo '{{"manifests": [{{"digest": "{digest}"}}]}}' >"$layout/index.json" ;;
esac
"""


@pytest.fixture
def source() -> Source:
    return Source(paths.REPOSITORY, "0.4.0-dev.0", "c0ffee", 7, "https://example.com/source", on_local_base=False)


def fake_buildah(folder: Path, monkeypatch: pytest.MonkeyPatch, *, fails: str = "never") -> Path:
    """Put a buildah first on PATH that notes its calls, and refuses to build for platforms that match `fails`."""
    (folder / "bin").mkdir()
    log = folder / "calls"
    base = "localhost/pseudoreal-base:none"
    (folder / "bin" / "buildah").write_text(BUILDAH.format(log=log, digest=DIGEST, base=base, fails=fails))
    for name in ("buildah", "skopeo", "debootstrap"):
        (folder / "bin" / name).touch()
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PSEUDOREAL_CACHE", str(folder / "cache"))
    (folder / "cache" / "images").mkdir(parents=True)
    monkeypatch.setattr(oci_images, "why_not", lambda _: None)
    return log


@pytest.mark.needs("pip")
def test_an_image_of_all_platforms_becomes_one_archive(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fake_buildah(tmp_path, monkeypatch)
    built = oci_images.build(Variant.CPU, source, tmp_path)
    assert (built.digest, built.platforms, built.missing) == (DIGEST, ["linux/amd64", "linux/arm64"], {})
    assert built.archive.name == "pseudoreal-trainer-0.4.0-dev.0-cpu.oci.tar"
    with tarfile.open(built.archive) as tar:
        assert tar.getnames() == ["index.json"]
    builds = [line for line in log.read_text().splitlines() if " bud " in line]
    assert len(builds) == 2
    for line, wanted in zip(builds, built.platforms, strict=True):
        assert f"--platform {wanted} --timestamp 7 " in line
        assert "--target trainer --build-arg TORCH=cpu --build-arg BASE_IMAGE=docker.io/library/python:" in line
        assert "--label org.opencontainers.image.revision=c0ffee" in line
        assert "--label org.opencontainers.image.source=https://example.com/source" in line
        assert "--label org.opencontainers.image.base.digest=sha256:" in line


@pytest.mark.needs("pip")
def test_a_platform_that_cannot_be_built_is_named(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_buildah(tmp_path, monkeypatch, fails="linux/arm64")
    built = oci_images.build(Variant.OPERATOR, source, tmp_path)
    assert built.platforms == ["linux/amd64"]
    assert built.missing == {"linux/arm64": "buildah ended with exit code 1."}, "the log is printed, not published"
    assert "no such wheel" in capsys.readouterr().out


@pytest.mark.needs("pip")
def test_an_image_without_any_platform_is_an_error(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_buildah(tmp_path, monkeypatch, fails="linux/")
    with pytest.raises(DevError, match=r"linux/amd64: buildah ended .*; linux/arm64: buildah ended"):
        oci_images.build(Variant.OPERATOR, source, tmp_path)


def test_a_published_reason_has_no_path_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> NoReturn:
        raise DevError(f"apt-get ended with exit code 100.\nThe last lines of {tmp_path}/apt.log:")

    made = release._Release(Version("0.4.0"), "c0ffee", 7, tmp_path, tmp_path)
    made.attempt("image operator", fail)
    assert made.omissions == {"image operator": "apt-get ended with exit code 100."}
    assert f"{tmp_path}/apt.log" in capsys.readouterr().out


def test_other_processors_need_an_emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert oci_images.why_not("linux/amd64", tmp_path) is None
    assert "install qemu-user-static" in str(oci_images.why_not("linux/arm64", tmp_path))
    (tmp_path / "qemu-aarch64").touch()
    assert oci_images.why_not("linux/arm64", tmp_path) is None


def test_tags_say_what_is_in_the_trainer() -> None:
    tags = {f"{variant.repository}:{variant.tag('1.0.0')}" for variant in Variant}
    trainers = {f"pseudoreal-trainer:1.0.0{mark}" for mark in ("", "-cpu", "-compiler")}
    assert tags == {"pseudoreal-operator:1.0.0", *trainers}


def test_a_layout_has_its_manifest_by_digest(tmp_path: Path) -> None:
    config, layer = archives.Blob("application/config", b"{}"), archives.Blob("application/layer", b"chart")
    digest = archives.write_layout(tmp_path / "layout", config, [layer], {"b": "2", "a": "1"}, "1.0.0")
    index = json.loads((tmp_path / "layout" / "index.json").read_text())
    (listed,) = index["manifests"]
    assert (listed["digest"], listed["annotations"]) == (digest, {"org.opencontainers.image.ref.name": "1.0.0"})
    blobs = tmp_path / "layout" / "blobs" / "sha256"
    for blob in blobs.iterdir():
        assert release.sha256(blob) == blob.name
    manifest = json.loads((blobs / digest.removeprefix("sha256:")).read_text())
    assert [one["digest"] for one in (manifest["config"], *manifest["layers"])] == [config.digest, layer.digest]
