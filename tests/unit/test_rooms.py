"""The rooms of a package: its folders import one way, in the order that its README or CONTRIBUTING.md lists them."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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


OPERATOR = Package(
    "pseudoreal_operator",
    Path(pseudoreal_operator.__file__).parent,
    ("", "cluster", "observe", "tell", "diagnose", "manifests", "decide", "reports", "controller"),
    ("__main__", "release", "self_test"),
)
TRAINER = Package(
    "pseudoreal_trainer",
    Path(pseudoreal_trainer.__file__).parent,
    (
        *("", "plan", "tell", "model", "data", "checkpoint", "engine"),
        *("preflight", "training", "measure", "export", "commands"),
    ),
    ("__main__", "cli", "pod", "worker"),
)
DEV = Package(
    "pseudoreal_dev",
    Path(pseudoreal_dev.__file__).parent,
    ("machine", "bundle", "cluster", "images", "demo", ""),
    ("__main__",),
)


@pytest.mark.parametrize(
    ("package", "room"),
    [
        pytest.param(package, room, id=f"{package.name}-{room or 'top'}")
        for package in (OPERATOR, TRAINER, DEV)
        for room in package.rooms
    ],
)
def test_a_room_imports_only_what_stands_before_it(package: Package, room: str) -> None:
    allowed = set(package.rooms[: package.rooms.index(room) + 1])
    for file in _files(package, room):
        assert set(_imported_rooms(package, file)) <= allowed, file


@pytest.mark.parametrize("package", [OPERATOR, TRAINER, DEV], ids=lambda package: package.name)
def test_every_folder_is_a_room(package: Package) -> None:
    folders = {file.parent.relative_to(package.folder).as_posix() for file in package.folder.rglob("*.py")}
    assert folders == {room or "." for room in package.rooms}


def _files(package: Package, room: str) -> list[Path]:
    return [file for file in (package.folder / room).glob("*.py") if file.stem not in package.programs]


def _imported_rooms(package: Package, file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package.name:
            inside = (node.module or "").split(".")[1:]
            for name in inside[:1] or [alias.name for alias in node.names]:
                yield name if name in package.rooms else ""
