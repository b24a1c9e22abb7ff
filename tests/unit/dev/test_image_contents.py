"""What the Dockerfile puts into images: torch for GPUs or CPUs, licence texts, labels, and a compiler in one."""

import json
import os
import re
import subprocess
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pseudoreal_dev.images import cpu_lock, licences

from tests.unit.dev.test_users import DOCKERFILE, stage

IN_THE_TRAINER = ("trainer", "data", "s3", "tensorboard", "wandb")
"""Extras of the project that the trainer's image has."""
FOR_GPUS = re.compile(r"nvidia-|cuda-|triton$")
IMAGE: Any = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}


def locked(file: Path) -> dict[str, str]:
    """Return the versions of a requirements file that Linux installs, by the canonical name of the package."""
    found = [Requirement(entry.split("\\")[0].strip()) for entry in cpu_lock.entries(file.read_text())]
    there = [one for one in found if one.marker is None or one.marker.evaluate(IMAGE)]
    return {canonicalize_name(one.name): next(iter(one.specifier)).version for one in there}


def needed(names: list[Requirement]) -> set[str]:
    """Return the names of the packages, as installed here, that these requirements need without a GPU."""
    wanted, seen = [*names], set[tuple[str, str]]()
    while wanted:
        one = wanted.pop()
        name = canonicalize_name(one.name)
        if FOR_GPUS.match(name):
            continue
        for extra in one.extras or {""}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                lines = [Requirement(line) for line in distribution(name).requires or ()]
                wanted += [line for line in lines if not line.marker or line.marker.evaluate(IMAGE | {"extra": extra})]
    return {name for name, _ in seen}


def test_the_lock_for_cpus_is_that_of_the_trainer_without_what_gpus_need() -> None:
    trainer, cpus = locked(cpu_lock.SOURCE), locked(cpu_lock.TARGET)
    assert cpus["torch"].partition("+") == (trainer["torch"], "+", "cpu")
    assert {name: version for name, version in trainer.items() if name not in cpus} == {
        name: version for name, version in trainer.items() if FOR_GPUS.match(name)
    }
    assert {**cpus, "torch": trainer["torch"]}.items() <= trainer.items()
    assert any(name.startswith("nvidia-") for name in trainer), "the comparison says something"


def test_the_lock_for_cpus_has_all_that_the_trainer_needs() -> None:
    project = next(d for d in distributions() if d.name == "pseudoreal")
    asked = [Requirement(line) for line in project.requires or ()]
    own = [one for one in asked if not one.marker or any(one.marker.evaluate({"extra": e}) for e in IN_THE_TRAINER)]
    assert needed(own) <= locked(cpu_lock.TARGET).keys()


def test_the_hashes_of_torch_are_taken_where_its_index_can_be_reached() -> None:
    names = ("nvidia-nccl==1", "torch==2.15.0", "triton==3 ; sys_platform == 'linux'")
    text = "".join(f"{name} \\\n    --hash=sha256:a\n" for name in names)
    known = cpu_lock.cpu_lock(text, lambda torch: f"{torch}+cpu \\\n    --hash=sha256:d\n")
    assert cpu_lock.entries(known) == ["torch==2.15.0+cpu \\\n    --hash=sha256:d\n"]
    assert "has no hash" not in known
    unknown = cpu_lock.cpu_lock(text, lambda _: None)
    assert cpu_lock.entries(unknown) == ["torch==2.15.0+cpu\n"]
    assert "torch alone has no hash" in unknown


def test_the_lock_for_cpus_is_up_to_date() -> None:
    """Its entries follow from trainer.txt; the hashes of torch, if it has any, come from elsewhere."""
    torch = next(entry for entry in cpu_lock.entries(cpu_lock.TARGET.read_text()) if entry.startswith("torch=="))
    wanted = cpu_lock.cpu_lock(cpu_lock.SOURCE.read_text(), lambda _: torch if "--hash" in torch else None)
    assert cpu_lock.TARGET.read_text() == wanted, "run `make lock UPGRADE=`"


def install(torch: str | None, folder: Path) -> tuple[int, list[str]]:
    """Run the trainer's installation with a pip and a uv that only note their calls."""
    calls = folder / "calls"
    for name in ("pip", "uv"):
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{calls}\n')
        (folder / name).chmod(0o755)
    (command,) = re.findall(r"^RUN (pip install (?:.*\\\n)*.*)$", stage("trainer"), re.MULTILINE)
    (default,) = re.findall(r"^ARG TORCH=(\w+)$", stage("trainer"), re.MULTILINE)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "TORCH": default if torch is None else torch}
    done = subprocess.run(["/bin/sh", "-c", command], env=environment, capture_output=True, text=True)
    return done.returncode, calls.read_text().splitlines()


@pytest.mark.parametrize(
    ("torch", "file"), [(None, "trainer.txt"), ("cuda", "trainer.txt"), ("cpu", "trainer-cpu.txt")]
)
def test_the_build_argument_chooses_the_lock(torch: str | None, file: str, tmp_path: Path) -> None:
    code, (_, installed, removed) = install(torch, tmp_path)
    assert code == 0
    assert installed.endswith(f" -r /tmp/requirements/{file}")
    assert ("--torch-backend cpu" in installed) == (torch == "cpu")
    assert removed == "pip uninstall --yes uv"


def test_another_build_argument_is_refused(tmp_path: Path) -> None:
    code, calls = install("rocm", tmp_path)
    assert code != 0
    assert not [call for call in calls if call.startswith("uv ")]


def test_only_the_compilers_image_has_a_compiler() -> None:
    assert "gcc" in stage("trainer-compiler")
    for name in ("base", "operator", "trainer"):
        assert "gcc" not in stage(name)
    assert DOCKERFILE.count("\nFROM trainer AS trainer-compiler\n") == 1
    users = re.findall(r"^USER (\S+)$", stage("trainer-compiler"), re.MULTILINE)
    assert users == ["0", "10001:10001"], "it ends without root, as the trainer"


@pytest.mark.parametrize("name", ["operator", "trainer"])
def test_images_are_labelled(name: str) -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)=("[^"]+"|\S+)', stage(name)))
    assert labels["title"] == f'"pseudoreal {name}"'
    assert labels.keys() == {"title", "description", "version", "licenses", "base.name"}
    assert (labels["version"], labels["base.name"], labels["licenses"]) == ("$VERSION", "$BASE_IMAGE", "Apache-2.0")
    arguments = re.findall(r"^ARG (\w+)$", stage(name), re.MULTILINE)
    assert {"VERSION", "BASE_IMAGE"} <= {*arguments}, "a stage sees only the arguments that it names"


@pytest.mark.parametrize("name", ["operator", "trainer"])
def test_images_have_the_licences_of_what_is_in_them(name: str) -> None:
    """The texts are collected after everything is installed, and before what changes with every commit."""
    lines = stage(name)
    assert lines.index("pip install") < lines.index("licences.py /usr/share/licenses") < lines.index("COPY crds")
    assert "COPY LICENSE NOTICE /usr/share/licenses/pseudoreal/" in lines


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of what is installed here and in the trainer's image."""
    folder = tmp_path_factory.mktemp("licences")
    names = locked(cpu_lock.SOURCE)
    licences.collect(folder, (one for one in distributions() if canonicalize_name(one.name) in names))
    return folder


@pytest.mark.needs("tokenizers")
def test_every_package_of_the_trainer_has_a_licence(collected: Path) -> None:
    index = json.loads((collected / licences.INDEX).read_text())
    assert {canonicalize_name(one["name"]) for one in index} == locked(cpu_lock.SOURCE).keys()
    silent = {one["name"] for one in index if not one["licence"] and not one["texts"]}
    assert silent == {"cuda-toolkit"}, "it has no files of its own, and says nothing"
    for one in index:
        for text in one["texts"]:
            assert (collected / text).stat().st_size > 0


def test_the_texts_of_torch_and_of_nvidia_are_there(collected: Path) -> None:
    index = {one["name"]: one for one in json.loads((collected / licences.INDEX).read_text())}
    assert "Redistribution and use" in "".join((collected / text).read_text() for text in index["torch"]["texts"])
    assert [name for name, one in index.items() if name.startswith("nvidia-") and not one["texts"]] == []


class Package(Distribution):
    """A package whose metadata folder holds the given files."""

    def __init__(self, folder: Path, metadata: str, files: dict[str, str]) -> None:
        self._folder, self._metadata, self._files = folder, metadata, files
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    def read_text(self, filename: str) -> str | None:
        record = "".join(f"{name},,\n" for name in self._files)
        return {"METADATA": self._metadata, "RECORD": record}.get(str(filename))

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return self._folder / path


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [
        ("License-Expression: MIT", "MIT"),
        ("Classifier: License :: OSI Approved :: BSD License\nLicense: long text", "BSD License"),
        ("License: Proprietary\n  of many lines", "Proprietary"),
        ("Author: nobody", ""),
    ],
)
def test_the_declared_licence_is_read(metadata: str, licence: str, tmp_path: Path) -> None:
    package = Package(tmp_path, f"Metadata-Version: 2.1\nName: one\nVersion: 1\n{metadata}\n", {})
    assert licences.declared(package) == licence


def test_texts_of_equal_names_stay_apart(tmp_path: Path) -> None:
    files = {
        "one-1.dist-info/licenses/LICENSE": "own",
        "one-1.dist-info/licenses/third_party/LICENSE": "of others",
        "one-1.dist-info/licenses/MIT.txt": "of some files",
        "one-1.dist-info/RECORD": "no licence",
        "one/licence_reader.py": "code",
        "one/lib/LICENSE.txt": "of a library",
        "one-1.dist-info/NOTICE.txt": "a notice",
    }
    package = Package(tmp_path / "site", "Metadata-Version: 2.1\nName: one\nVersion: 1\n", files)
    licences.collect(tmp_path / "out", [package])
    written = {
        path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()
    }
    assert written == {
        "one-1/licenses/LICENSE",
        "one-1/licenses/third_party/LICENSE",
        "one-1/licenses/MIT.txt",
        "one-1/NOTICE.txt",
        "one-1/one/lib/LICENSE.txt",
        licences.INDEX,
    }
