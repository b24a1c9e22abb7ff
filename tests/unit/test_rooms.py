"""The rooms of a package: its folders import one way, in the order that its README or CONTRIBUTING.md lists them."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pseudoreal_api
import pseudoreal_dev
import pseudoreal_operator
import pseudoreal_trainer
import pytest


@dataclass(frozen=True)
class Package:
    """`rooms`: folders, each importing only what stands before it ("" is the top level); `programs` import anything."""

    name: str
    folder: Path
    rooms: tuple[str, ...]
    programs: tuple[str, ...]


API = Package(
    "pseudoreal_api",
    Path(pseudoreal_api.__file__).parent,
    ("", "wire", "spec", "status", "resolved", "publish"),
    ("__main__",),
)
OPERATOR = Package(
    "pseudoreal_operator",
    Path(pseudoreal_operator.__file__).parent,
    ("", "cluster", "observe", "status", "failures", "manifests", "lifecycle", "endpoint", "loop"),
    ("__main__", "release", "self_test"),
)
TRAINER = Package(
    "pseudoreal_trainer",
    Path(pseudoreal_trainer.__file__).parent,
    (
        *("", "plan", "forecast.memory", "forecast.time", "forecast", "heartbeat", "pod", "model", "data"),
        *("checkpoint.storage", "checkpoint", "engine.ranks", "engine.state", "engine"),
        *("preflight", "training", "measure", "convert", "cli"),
    ),
    ("__main__",),
)
DEV = Package(
    "pseudoreal_dev",
    Path(pseudoreal_dev.__file__).parent,
    ("machine", "bundle", "cluster", "images", "demo", ""),
    ("__main__",),
)


PACKAGES = (API, OPERATOR, TRAINER, DEV)
MOST_FILES = 14


@pytest.mark.parametrize(
    ("package", "room"),
    [
        pytest.param(package, room, id=f"{package.name}-{room or 'top'}")
        for package in PACKAGES
        for room in package.rooms
    ],
)
def test_a_room_imports_only_what_stands_before_it(package: Package, room: str) -> None:
    allowed = set(package.rooms[: package.rooms.index(room) + 1])
    for file in _files(package, room):
        assert set(_imported_rooms(package, file)) <= allowed, file


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_room_has_few_files_and_a_name_of_its_own(package: Package) -> None:
    for room in package.rooms:
        assert len(_files(package, room)) <= MOST_FILES, room
    names = [room.rpartition(".")[2] for room in package.rooms]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_folder_is_a_room(package: Package) -> None:
    folders = {file.parent.relative_to(package.folder) for file in package.folder.rglob("*.py")}
    assert folders == {Path(*room.split(".")) for room in package.rooms}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_room_says_what_lives_there_and_what_does_not(package: Package) -> None:
    for room in package.rooms:
        said = ast.get_docstring(ast.parse((package.folder / Path(*room.split(".")) / "__init__.py").read_text())) or ""
        assert room == "" or len(re.findall(r"\.(?=\s|$)", said)) >= 2, room


def _files(package: Package, room: str) -> list[Path]:
    files = package.folder.joinpath(*room.split(".")).glob("*.py")
    return [file for file in files if file.stem not in (*package.programs, "__init__")]


def _imported_rooms(package: Package, file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package.name:
            for alias in node.names:
                yield _room_of(package, f"{node.module}.{alias.name}".split(".")[1:])


def _room_of(package: Package, path: list[str]) -> str:
    """The longest room that the path of a module, or of a name in one, begins with."""
    found = (".".join(path[:count]) for count in range(len(path), -1, -1))
    return next(room for room in found if room in package.rooms)
