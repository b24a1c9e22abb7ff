"""The images of a release as OCI archives, one for each target with all its platforms."""

import json
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pseudoreal_dev.images import base_image, build_settings, buildah, images, pin
from pseudoreal_dev.machine import packages, paths
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.lock import exclusive
from pseudoreal_dev.machine.progress import progress
from pseudoreal_dev.release import archives

PLATFORMS = ("linux/amd64", "linux/arm64")
_MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
_BINFMT = Path("/proc/sys/fs/binfmt_misc")


class Variant(StrEnum):
    """An image of the release. The two last are tags of the trainer's repository."""

    OPERATOR = "operator"
    TRAINER = "trainer"
    CPU = "trainer-cpu"
    COMPILER = "trainer-compiler"

    @property
    def repository(self) -> str:
        return "pseudoreal-operator" if self is Variant.OPERATOR else "pseudoreal-trainer"

    def tag(self, version: str) -> str:
        return version + {Variant.CPU: "-cpu", Variant.COMPILER: "-compiler"}.get(self, "")

    @property
    def build_options(self) -> list[str]:
        target = "trainer" if self is Variant.CPU else str(self)
        return ["--target", target, "--build-arg", f"TORCH={'cpu' if self is Variant.CPU else 'cuda'}"]


@dataclass(frozen=True)
class Source:
    """Inputs of the images' builds. `folder`: the files of the commit; `time`: its time in seconds; `url`: where the
    source is published, or empty; `on_local_base`: whether the base is Debian, made here, and not the pinned image."""

    folder: Path
    version: str
    commit: str
    time: int
    url: str
    on_local_base: bool


@dataclass(frozen=True)
class Built:
    """An OCI archive. `digest`: of its index, which a registry keeps; `missing`: platform -> why it is not in there."""

    archive: Path
    digest: str
    platforms: list[str]
    missing: dict[str, str]


def build(variant: Variant, source: Source, folder: Path) -> Built:
    """Build an image for each platform, and write them into one archive. Raises DevError if there is none."""
    needed = ("buildah", "skopeo", "debootstrap") if source.on_local_base else ("buildah", "skopeo")
    packages.install_missing({program: program for program in needed})
    with exclusive("images"):
        names, missing = [], {}
        for wanted in PLATFORMS:
            try:
                names.append(_build(variant, source, wanted))
            except DevError as error:
                progress.say(str(error))
                # Logs have paths of this machine, and the reason is published.
                missing[wanted] = str(error).partition("\n")[0]
        if not names:
            raise DevError("; ".join(f"{wanted}: {why}" for wanted, why in missing.items()))
        archive = folder / f"{variant.repository}-{variant.tag(source.version)}.oci.tar"
        with progress.step(f"writing {archive.name}"):
            digest = _write(variant, source, names, archive)
    return Built(archive, digest, [wanted for wanted in PLATFORMS if wanted not in missing], missing)


def why_not(wanted: str, binfmt: Path = _BINFMT) -> str | None:
    """Return why this machine cannot build for a platform, or None."""
    if platform.machine() == _MACHINES[wanted] or (binfmt / f"qemu-{_MACHINES[wanted]}").exists():
        return None
    return (
        f"this machine cannot run programs for {wanted}; install qemu-user-static and register it with binfmt_misc, or"
        " build there"
    )


def _build(variant: Variant, source: Source, wanted: str) -> str:
    """Build for one platform, and return the name of the image."""
    if why := why_not(wanted):
        raise DevError(why)
    base, digest = (
        _local_base(wanted) if source.on_local_base else pin.pinned((source.folder / "Dockerfile").read_text())
    )
    name = f"localhost/release-{variant}:{wanted.rpartition('/')[2]}"
    log = paths.logs() / f"release-{variant}.log"
    log.unlink(missing_ok=True)
    context = images.stage(
        images.Target.OPERATOR if variant is Variant.OPERATOR else images.Target.TRAINER, source.folder
    )
    labels = [word for label in _labels(source, digest) for word in ("--label", label)]
    volumes = [word for mount in build_settings.mounts() for word in ("--volume", mount)]
    given = ["--platform", wanted, "--timestamp", str(source.time), "--identity-label=false", "--layers", "--no-cache"]
    image = base if source.on_local_base else f"{base}@{digest}"
    arguments = ["--build-arg", f"BASE_IMAGE={image}", "--build-arg", f"SOURCE_DATE_EPOCH={source.time}"]
    with progress.step(f"building the {variant} image for {wanted}", log=log):
        buildah.clear_leftovers()
        options = [*given, *variant.build_options, *arguments, *labels, *volumes, "--tag", name]
        buildah.run("bud", *options, "--file", context / "Dockerfile", context, log=log)
    return name


def _local_base(wanted: str) -> tuple[str, str]:
    if platform.machine() != _MACHINES[wanted]:
        raise DevError(f"BASE=local makes a base for this machine's processor alone, and not for {wanted}")
    name = base_image.build()
    return name, buildah.output("inspect", "--type", "image", "--format", "{{.FromImageDigest}}", name)


def _labels(source: Source, digest: str) -> Iterator[str]:
    yield f"org.opencontainers.image.revision={source.commit}"
    yield f"org.opencontainers.image.base.digest={digest}"
    if source.url:
        yield f"org.opencontainers.image.source={source.url}"


def _write(variant: Variant, source: Source, names: list[str], archive: Path) -> str:
    """Write the platforms' images and their index into an OCI archive, and return the index's digest."""
    layout, listed = archive.with_suffix(""), f"localhost/release-{variant}:all"
    if listed in buildah.images():
        buildah.output("manifest", "rm", listed)
    buildah.output("manifest", "create", listed)
    for name in names:
        buildah.output("manifest", "add", listed, name)
    buildah.output("manifest", "push", "--all", "--rm", listed, f"oci:{layout}:{variant.tag(source.version)}")
    for name in names:
        buildah.output("rmi", name)
    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    archives.tar_folder(layout, archive, source.time)
    shutil.rmtree(layout)
    return str(entry["digest"])
