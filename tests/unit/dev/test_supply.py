"""Installed packages are exactly the reviewed ones: pinned versions with hashes, and a base image with its digest."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from pseudoreal_dev.bundle import wheels
from pseudoreal_dev.images import images, pin
from pseudoreal_dev.machine import paths
from pseudoreal_dev.machine.errors import DevError

REQUIREMENTS = sorted((paths.REPOSITORY / "requirements").glob("*.txt"))
DIGEST = f"sha256:{'a' * 64}"
INSTALLS = re.compile(r"\bpip install\b|\$\(call UV_INSTALL,")


def commands(file: Path) -> list[str]:
    """Return the commands of a Dockerfile or Makefile, with continued lines joined."""
    lines = file.read_text().replace("\\\n", " ").splitlines()
    return [part for line in lines if not line.startswith("#") for part in line.split("&&")]


@pytest.mark.parametrize("file", REQUIREMENTS, ids=lambda file: file.stem)
def test_requirements_are_exact_and_have_hashes(file: Path) -> None:
    text = file.read_text()
    assert "://" not in text, "the package index is configured on the machine, not in the file"
    for entry in text.replace("\\\n", "").splitlines():
        requirement, *hashes = entry.split("--hash=")
        assert [specifier.operator for specifier in Requirement(requirement).specifier] == ["=="], entry
        assert hashes, f"{requirement} has no hash; run `make lock`"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one.strip()) for one in hashes)


@pytest.mark.parametrize("name", ["Dockerfile", "Makefile"])
def test_nothing_is_installed_without_its_hash(name: str) -> None:
    found = commands(paths.REPOSITORY / name)
    installs = [line for line in found if INSTALLS.search(line) and not line.startswith("UV_INSTALL = ")]
    # The project itself has no hash; its build requirements have hashes, which uv verifies.
    if name == "Makefile":
        assert "PROJECT = --no-deps --build-constraints requirements/build.txt --editable ." in found
        # torch's builds for CPUs are in an index that not every machine that locks reaches: they have a version only.
        (for_cpus,) = (line for line in installs if line.startswith("CPU_TORCH = "))
        assert for_cpus.endswith(" --no-deps --torch-backend cpu $(TORCH)")
        installs.remove(for_cpus)
    assert installs
    assert not [line for line in installs if "--require-hashes" not in line and "$(PROJECT)" not in line]


def test_what_builds_the_project_is_among_the_constraints() -> None:
    project = tomllib.loads((paths.REPOSITORY / "pyproject.toml").read_text())
    pins = wheels.pins_in((paths.REPOSITORY / "requirements" / "build.txt").read_text())
    assert {Requirement(one).name for one in project["build-system"]["requires"]} <= pins.keys()


@pytest.mark.parametrize("target", images.Target)
def test_a_build_sees_each_file_of_requirements_that_it_installs(target: images.Target) -> None:
    stages = (paths.REPOSITORY / "Dockerfile").read_text().split("\nFROM ")
    (stage,) = [stage for stage in stages if stage.partition("\n")[0].endswith(f" AS {target}")]
    copied = set(re.findall(r"COPY (requirements/\S+)", stage))
    assert copied == {name for name in images.CONTEXT[target] if name.startswith("requirements/")}


def test_the_base_image_has_a_digest() -> None:
    image, digest = pin.pinned((paths.REPOSITORY / "Dockerfile").read_text())
    assert ":" in image, "the image's tag stands before the digest"
    assert re.fullmatch("sha256:[0-9a-f]{64}", digest)


@pytest.mark.parametrize("line", ["ARG BASE_IMAGE=python:3.12-slim", "ARG BASE_IMAGE=python@sha256:1", ""])
def test_a_dockerfile_without_a_digest_is_refused(line: str) -> None:
    with pytest.raises(DevError, match="give the base image its digest"):
        pin.pinned(f"# A comment.\n{line}\n")


@pytest.mark.parametrize("image", [f"python:3.12@{DIGEST}", "python", "localhost:5000/python"])
def test_only_of_a_tag_a_digest_can_be_asked(image: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"ARG BASE_IMAGE=python:3@{DIGEST}\n")
    with pytest.raises(DevError, match="write it as NAME:TAG"):
        pin.write(image, tmp_path / "Dockerfile")
