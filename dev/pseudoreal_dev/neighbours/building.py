"""A program from a Go module of its own, with files of that module, into the cache."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.machine import go, paths
from pseudoreal_dev.machine.lock import exclusive
from pseudoreal_dev.machine.progress import Cost, progress


@dataclass(frozen=True)
class Neighbour:
    tool: str
    """Folder below dev/tools whose go.mod pins it; several programs may share it."""
    program: str
    """Its name in the cache."""
    module: str
    package: str
    files: Mapping[str, str]
    """Name in the cache -> file or folder of the module."""


def built(neighbour: Neighbour) -> Path:
    """The folder in the cache with the program and the files; they are made when they are not there."""
    pinned = paths.TOOLS / neighbour.tool
    folder = go.folder_of(pinned)
    with exclusive("binaries"):
        if not (folder / neighbour.program).exists():
            folder.mkdir(parents=True, exist_ok=True)
            with progress.step(f"building {neighbour.program}", cost=Cost.FIRST_RUN):
                go.download(pinned, [neighbour.package])
                _copy(neighbour, go.source_of(pinned, neighbour.module), folder)
                # The program comes last: where it is, all is there.
                go.build(pinned, neighbour.package, folder / neighbour.program)
    return folder


def _copy(neighbour: Neighbour, source: Path, folder: Path) -> None:
    """Copies contents alone: files in Go's cache are read-only, and an interrupted build is begun again."""
    for name, path in neighbour.files.items():
        if (source / path).is_dir():
            (folder / name).mkdir(exist_ok=True)
            for file in (source / path).iterdir():
                shutil.copyfile(file, folder / name / file.name)
        else:
            shutil.copyfile(source / path, folder / name)
