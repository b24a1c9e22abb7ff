"""Servers that stand for the object storage of Google and of Azure in tests, made once in the cache."""

import os
import shutil
from pathlib import Path

from pseudoreal_dev.machine import paths, shell
from pseudoreal_dev.machine.content_hash import hash_files
from pseudoreal_dev.machine.lock import exclusive
from pseudoreal_dev.machine.progress import Cost, progress
from pseudoreal_dev.neighbours.building import Neighbour, built

_FAKE_GCS = Neighbour(
    tool="fake-gcs-server",
    program="fake-gcs-server",
    module="github.com/fsouza/fake-gcs-server",
    package="github.com/fsouza/fake-gcs-server",
    files={},
)
_AZURITE = paths.TOOLS / "azurite"


def fake_gcs_server() -> Path:
    """Return the program pinned by dev/tools/fake-gcs-server, after building it if needed."""
    return built(_FAKE_GCS) / _FAKE_GCS.program


def azurite() -> Path:
    """Return the program pinned by dev/tools/azurite, which node runs, after its installation if needed."""
    folder = paths.packages() / f"azurite-{hash_files(_AZURITE, ['package*.json'])}"
    program = folder / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    if folder.exists():
        return program
    with exclusive("packages"):
        if not folder.exists():
            partial, log = folder.with_name(f".{folder.name}.partial"), paths.logs() / "azurite.log"
            with progress.step("installing Azurite", cost=Cost.FIRST_RUN, log=log):
                shutil.rmtree(partial, ignore_errors=True)
                shutil.copytree(_AZURITE, partial)
                # Scripts of packages are not run: what is pinned is all that is executed, and only in tests.
                shell.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], log, cwd=partial)
                os.replace(partial, folder)
    return program
