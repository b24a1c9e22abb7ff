"""The rooms of a package: its folders import one way, in the order that its README or CONTRIBUTING.md lists them."""

import ast
import re
from pathlib import Path

import pytest

from tests.rooms import CONTRIBUTING, PACKAGES, Package, files, imported_rooms, with_drawing


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
    for file in files(package, room):
        assert set(imported_rooms(package, file)) <= allowed, file


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_each_room_has_a_name_of_its_own(package: Package) -> None:
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


def test_the_drawing_of_the_rooms_is_up_to_date() -> None:
    """`python -m tests.rooms` draws it anew."""
    text = CONTRIBUTING.read_text()
    assert with_drawing(text) == text
