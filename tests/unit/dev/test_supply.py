"""Installed packages are exactly the reviewed ones: pinned versions with hashes, and a base image with its digest."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from pseudoreal_dev.bundle import wheels
from pseudoreal_dev.images import cpu_lock, images, pin
from pseudoreal_dev.machine import paths
from pseudoreal_dev.machine.errors import DevError

REQUIREMENTS = sorted((paths.REPOSITORY / "requirements").glob("*.txt"))
DIGEST = f"sha256:{'a' * 64}"
FOREIGN = re.compile(
    r"(?<![\w./-])pseudoreal/(?:operator|trainer)\b[:@\s\"'`]|pip install '?pseudoreal\b|'pseudoreal\["
)
"""Names of registries that anybody may claim: an account of Docker Hub, and a project on the Python index."""
INSTALLS = re.compile(r"\bpip install\b|\$\(call UV_INSTALL,")


def commands(file: Path) -> list[str]:
    """Return the commands of a Dockerfile or Makefile, with continued lines joined."""
    lines = file.read_text().replace("\\\n", " ").splitlines()
    return [part for line in lines if not line.startswith("#") for part in re.split("&&|;;", line)]


@pytest.mark.parametrize("file", REQUIREMENTS, ids=lambda file: file.stem)
def test_requirements_are_exact_and_have_hashes(file: Path) -> None:
    text = file.read_text()
    assert "://" not in text, "the package index is configured on the machine, not in the file"
    for entry in cpu_lock.entries(text):
        requirement, *hashes = entry.replace("\\\n", "").strip().split("--hash=")
        assert [specifier.operator for specifier in Requirement(requirement).specifier] == ["=="], entry
        excused = file == cpu_lock.TARGET and entry.startswith("torch==") and "the index of those builds" in text
        assert hashes or excused, f"{requirement} has no hash; run `make lock`"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one.strip()) for one in hashes)


@pytest.mark.parametrize("name", ["Dockerfile", "Makefile"])
def test_nothing_is_installed_without_its_hash(name: str) -> None:
    found = commands(paths.REPOSITORY / name)
    installs = [line for line in found if INSTALLS.search(line) and not line.startswith("UV_INSTALL = ")]
    # Of torch's build for CPUs the hash may be unknown; uv verifies those that there are, and takes nothing else.
    if name == "Dockerfile":
        (for_cpus,) = (line for line in installs if "--torch-backend cpu" in line)
        assert "--no-deps" in for_cpus
        assert for_cpus.strip().endswith("-r /tmp/requirements/trainer-cpu.txt")
        installs.remove(for_cpus)
    # The project itself has no hash; its build requirements have hashes, which uv verifies.
    if name == "Makefile":
        assert "PROJECT = --no-deps --build-constraints requirements/build.txt --editable ." in found
        # torch's builds for CPUs are in an index that not every machine that locks reaches: they have a version only.
        (for_cpus,) = (line for line in installs if line.startswith("CPU_TORCH = "))
        assert for_cpus.endswith(" --no-deps --torch-backend cpu $(TORCH)")
        installs.remove(for_cpus)
    assert installs
    assert not [line for line in installs if "--require-hashes" not in line and "$(PROJECT)" not in line]


def test_names_that_others_may_claim_are_not_used() -> None:
    parts = ("charts", "docs", "examples", "crds", "operator", "trainer", "dev/pseudoreal_dev")
    files = [*paths.REPOSITORY.glob("*.md"), *(file for part in parts for file in (paths.REPOSITORY / part).rglob("*"))]
    texts = {file: file.read_text() for file in files if file.suffix in {".md", ".yaml", ".py", ".tpl", ".txt", ".sh"}}
    found = {str(file): match[0] for file, text in texts.items() if (match := FOREIGN.search(text))}
    assert found == {}


@pytest.mark.parametrize(
    "text", ["image: pseudoreal/operator:1", "pip install 'pseudoreal[data]'", "pip install pseudoreal"]
)
def test_such_names_are_found(text: str) -> None:
    assert FOREIGN.search(text)


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
