"""Builds a program from a pinned Go module into the cache, and copies files of the module."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.machine import go, paths
from pseudoreal_dev.machine.lock import exclusive
from pseudoreal_dev.machine.progress import Cost, progress


@dataclass(frozen=True)
class Neighbour:
    """A program that runs beside the operator, and files of the program's Go module."""

    tool: str
    """Folder below dev/tools with the go.mod that pins the module. Several programs may share the folder."""
    program: str
    """Name of the program in the cache."""
    module: str
    package: str
    files: Mapping[str, str]
    """Name in the cache -> file or folder of the module."""


def built(neighbour: Neighbour) -> Path:
    """Return the cache folder with the program and the files, after creating them if needed."""
    pinned = paths.TOOLS / neighbour.tool
    folder = go.folder_of(pinned)
    if (folder / neighbour.program).exists():  # no wait for another run's builds
        return folder
    with exclusive("binaries"):
        if not (folder / neighbour.program).exists():
            folder.mkdir(parents=True, exist_ok=True)
            with progress.step(f"building {neighbour.program}", cost=Cost.FIRST_RUN):
                go.download(pinned, [neighbour.package])
                _copy(neighbour, go.source_of(pinned, neighbour.module), folder)
                # The program comes last: its presence shows that all files are complete.
                go.build(pinned, neighbour.package, folder / neighbour.program)
    return folder


def _copy(neighbour: Neighbour, source: Path, folder: Path) -> None:
    """Copy contents without permissions: files in Go's cache are read-only, and an interrupted build overwrites its
    copies."""
    for name, path in neighbour.files.items():
        if (source / path).is_dir():
            (folder / name).mkdir(exist_ok=True)
            for file in (source / path).iterdir():
                shutil.copyfile(file, folder / name / file.name)
        else:
            shutil.copyfile(source / path, folder / name)
