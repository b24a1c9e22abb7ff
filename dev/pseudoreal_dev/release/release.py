"""`make release`: everything that a release publishes, in `dist/`. It publishes nothing itself."""

import hashlib
import json
import re
import shutil
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from packaging.version import Version

from pseudoreal_dev.cluster import binaries
from pseudoreal_dev.krew import plugin
from pseudoreal_dev.machine import paths, shell, version
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.progress import progress
from pseudoreal_dev.release import changelog, charts, manifests, oci_images
from pseudoreal_dev.release.oci_images import Variant

Json = dict[str, Any]

DIST = paths.REPOSITORY / "dist"
SBOMS = paths.REPOSITORY / ".sbom"
MANIFEST, SUMS, NOTES = "release.json", "SHA256SUMS", "RELEASE_NOTES.md"
# host[:port]/path, or the path of an account of Docker Hub: lower case, without scheme, tag and final slash.
_REGISTRY = re.compile(r"[a-z0-9]+([._-]+[a-z0-9]+)*(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")


@dataclass(frozen=True)
class Wishes:
    """Options of `make release`; empty if not given."""

    version: str = ""
    registry: str = ""
    variants: Sequence[Variant] = tuple(Variant)
    on_local_base: bool = False
    krew_url: str = ""
    homepage: str = ""
    source_url: str = ""


@dataclass
class _Release:
    """A release while it is made. `time`: of the commit, in seconds. `omissions`: missing part -> reason."""

    version: Version
    commit: str
    time: int
    source: Path
    folder: Path
    images: dict[Variant, oci_images.Built] = field(default_factory=dict)
    charts: dict[str, str] = field(default_factory=dict)
    omissions: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return version.semantic(self.version)

    def attempt(self, part: str, make: Callable[[], None]) -> None:
        """Make a part that some machines cannot make; there it is an omission."""
        try:
            make()
        except DevError as error:
            progress.say(str(error))
            # Logs have paths of this machine, and the reason is published.
            self.omissions[part] = str(error).partition("\n")[0]


def make(wishes: Wishes, repository: Path = paths.REPOSITORY, dist: Path = DIST) -> Path:
    """Make the release of the commit that is checked out, and return its folder. Raises DevError."""
    wanted = _checked_version(wishes, repository)
    if wishes.registry and not _REGISTRY.fullmatch(wishes.registry):
        raise DevError(
            f"IMAGES is {wishes.registry!r}; name a registry's host and path alone, as registry.example/team"
        )
    if bool(wishes.krew_url) != bool(wishes.homepage):
        raise DevError(
            "URL and HOMEPAGE belong together: where the krew archive will be published, and the project's page"
        )
    commit, time = _clean_commit(repository)
    paths.cache().mkdir(parents=True, exist_ok=True)
    # In the cache: images of two architectures are tens of gigabytes, and /tmp may be in memory.
    with TemporaryDirectory(dir=paths.cache()) as work:
        source, folder = Path(work) / f"pseudoreal-{wanted}", Path(work) / "dist"
        _export(repository, commit, source)
        folder.mkdir()
        release = _Release(wanted, commit, time, source, folder)
        _fill(release, wishes)
        if dist.exists():
            shutil.rmtree(dist)  # if this fails, the next line would move the release into the old one
        shutil.move(folder, dist)
    return dist


def _fill(release: _Release, wishes: Wishes) -> None:
    helm = _helm()
    url = f"{wishes.source_url}/blob/{release.commit}" if wishes.source_url else ""
    notes = changelog.notes((release.source / "CHANGELOG.md").read_text(), release.version, url)
    (release.folder / NOTES).write_text(notes)
    _build_images(release, wishes)
    with progress.step("building the wheel and the source archive"):
        _build_wheel(release)
    with progress.step("packaging the charts, install.yaml and the kustomization"):
        _package_charts(release, wishes, helm)
    _pack_krew(release, wishes)
    _copy_sboms(release)
    _write_manifest(release, wishes, helm)
    files = sorted(path for path in release.folder.rglob("*") if path.is_file())
    lines = [f"{sha256(path)}  {path.relative_to(release.folder).as_posix()}\n" for path in files]
    (release.folder / SUMS).write_text("".join(lines))


def _checked_version(wishes: Wishes, repository: Path) -> Version:
    stated = version.read(repository)
    if wishes.version and changelog.parse(wishes.version) != stated:
        raise DevError(
            f"VERSION is {wishes.version}, and pyproject.toml says {stated}; `make cut VERSION={wishes.version}` writes"
            " it into all files, to be committed"
        )
    if stated.is_devrelease and not wishes.version:
        raise DevError(
            f"pyproject.toml says {stated}, a version under development. Ask for it with VERSION={stated}, or cut a"
            f" release first: make cut VERSION={stated.base_version}"
        )
    stale = [path for path, text in version.stamped(repository) if path.read_text() != text]
    if stale:
        names = ", ".join(str(path.relative_to(repository)) for path in stale)
        raise DevError(f"{names}: another version than pyproject.toml's {stated}; run `make generate` and commit")
    return stated


def _clean_commit(repository: Path) -> tuple[str, int]:
    """Return the commit that is checked out, and its time in seconds. Raises DevError if a file differs from it."""
    changed = shell.output(["git", "-C", repository, "status", "--porcelain"]).splitlines()
    if changed:
        shown = ", ".join(line[3:] for line in changed[:5]) + (", ..." if len(changed) > 5 else "")
        raise DevError(
            f"a release is made from a commit, and these files differ from it: {shown}. Commit or remove them"
        )
    commit, time = shell.output(["git", "-C", repository, "log", "-1", "--format=%H %ct"]).split()
    return commit, int(time)


def _export(repository: Path, commit: str, folder: Path) -> None:
    """Write the commit's files into a folder. git gives them the commit's time."""
    packed = folder.with_suffix(".tar")
    shell.output(["git", "-C", repository, "archive", "--output", packed, commit])
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    packed.unlink()


def _helm() -> Path:
    found = shutil.which("helm")
    return Path(found) if found else binaries.build("helm").path("helm")


def _build_images(release: _Release, wishes: Wishes) -> None:
    source = oci_images.Source(
        release.source, release.name, release.commit, release.time, wishes.source_url, wishes.on_local_base
    )
    for variant in Variant:
        part = f"image {variant}"
        if variant not in wishes.variants:
            release.omissions[part] = "left out by TARGETS"
            continue

        def build(variant: Variant = variant) -> None:
            release.images[variant] = oci_images.build(variant, source, release.folder)

        release.attempt(part, build)
        if variant in release.images:
            for platform, why in release.images[variant].missing.items():
                release.omissions[f"{part} for {platform}"] = why


def _build_wheel(release: _Release) -> None:
    uv = Path(sys.executable).with_name("uv")
    build_lock = release.source / "requirements" / "build.txt"
    command: list[str | Path] = [
        uv,
        "build",
        "--quiet",
        "--wheel",
        "--sdist",
        "--build-constraints",
        build_lock,
        "--require-hashes",
    ]
    time = {"SOURCE_DATE_EPOCH": str(release.time)}
    shell.output([*command, "--out-dir", release.folder, release.source], environment=time)
    (release.folder / ".gitignore").unlink(missing_ok=True)


def _package_charts(release: _Release, wishes: Wishes, helm: Path) -> None:
    published = _published(release, wishes)
    for chart in sorted((release.source / "charts").iterdir()):
        if published:
            charts.name_images(chart, published)
        packed = charts.package(helm, chart, release.folder, release.time)
        archive = release.folder / f"{chart.name}-{release.name}.chart.oci.tar"
        release.charts[chart.name] = charts.write_oci_archive(packed, chart, archive, release.time)
    text = manifests.install_yaml(helm, release.source / "charts/pseudoreal", release.name, published=bool(published))
    (release.folder / "install.yaml").write_text(text)
    (release.folder / "kustomization.yaml").write_text(manifests.kustomization(text))


def _published(release: _Release, wishes: Wishes) -> dict[str, str]:
    """Return the names of the images where IMAGES says they will be, by target; empty if charts cannot name them."""
    part = "images in the charts and in install.yaml"
    if not wishes.registry:
        release.omissions[part] = "IMAGES names no registry, so the charts refuse to be installed without images"
        return {}
    missing = [variant for variant in (Variant.OPERATOR, Variant.TRAINER) if variant not in release.images]
    if missing:
        release.omissions[part] = f"of {' and '.join(missing)} there is no archive whose digest they could name"
        return {}
    return {variant: _reference(wishes.registry, variant, built) for variant, built in release.images.items()}


def _reference(registry: str, variant: Variant, built: oci_images.Built) -> str:
    return f"{registry}/{variant.repository}@{built.digest}"


def _pack_krew(release: _Release, wishes: Wishes) -> None:
    packed = plugin.archive()
    (release.folder / plugin.ARCHIVE).write_bytes(packed)
    if wishes.krew_url:
        manifest = plugin.manifest(wishes.krew_url, wishes.homepage, packed)
        (release.folder / f"krew-{plugin.MANIFEST}").write_text(yaml.safe_dump(manifest, sort_keys=False, width=120))
    else:
        release.omissions["manifest for krew"] = "URL and HOMEPAGE do not say where the archive will be published"


def _copy_sboms(release: _Release) -> None:
    found = sorted(SBOMS.glob("*.cdx.json"))
    if not found:
        raise DevError(f"{SBOMS} has no list of what is in the images; run `make sbom`")
    for file in found:
        shutil.copyfile(file, release.folder / f"sbom-{file.name}")


def _write_manifest(release: _Release, wishes: Wishes, helm: Path) -> None:
    content: Json = {
        "version": release.name,
        "commit": release.commit,
        "time": release.time,
        "helm": shell.output([helm, "version", "--short"]).strip(),
        "images": {
            variant: {
                "archive": built.archive.name,
                "digest": built.digest,
                "platforms": built.platforms,
                "base": "made with the release (BASE=local)" if wishes.on_local_base else "the Dockerfile's",
                "publishedAs": f"{wishes.registry}/{variant.repository}:{variant.tag(release.name)}"
                if wishes.registry
                else None,
            }
            for variant, built in release.images.items()
        },
        "charts": release.charts,
        "omissions": release.omissions,
    }
    (release.folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def listing(folder: Path) -> str:
    """Return the files with their sizes in bytes, and what is not among them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{path.stat().st_size:>15,}  {path.relative_to(folder)}" for path in files]
    omissions = json.loads((folder / MANIFEST).read_text())["omissions"]
    return "\n".join([*lines, *(f"not in it: {part}: {why}" for part, why in omissions.items())])
