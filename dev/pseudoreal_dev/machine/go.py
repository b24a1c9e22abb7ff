"""Go modules of this repository that pin programs, and how their programs are built with the machine's Go."""

import os
from collections.abc import Sequence
from pathlib import Path

from pseudoreal_dev.machine import paths, shell
from pseudoreal_dev.machine.content_hash import hash_files
from pseudoreal_dev.machine.progress import Cost, progress

# A lazier garbage collector spends memory, of which there is enough, to save a part of the compiler's time.
ENVIRONMENT = {"CGO_ENABLED": "0", "GOGC": "400"}
STRIPPED = "-s -w"
"""Linker flags that leave out what only a debugger needs."""


def folder_of(module: Path, sources: Sequence[str] = ()) -> Path:
    """The folder in the cache for what is built of a module, by its content, `sources` among it, and the compiler."""
    compiler = shell.output(["go", "version"])
    return paths.binaries() / hash_files(module, ["*.mod", "*.sum", *sources], [compiler])


def download(module: Path, packages: Sequence[str]) -> None:
    log = paths.logs() / "go-mod-download.log"
    with progress.step("downloading Go modules", cost=Cost.FIRST_RUN, log=log):
        # Listing fetches just the modules that the programs need, and says which; `go mod download` fetches all.
        shell.run(["go", "list", "-deps", "-f", "", *packages], log, environment=ENVIRONMENT, cwd=module)


def build(module: Path, package: str, target: Path, *, linker_flags: str = STRIPPED) -> None:
    """Builds a program. An interrupted build leaves nothing at `target`."""
    name, log = target.name, paths.logs() / f"build-{target.name}.log"
    partial = target.with_name(f".{name}.partial")
    # Whatever else runs is waited for: people, tests, images.
    options = ["-v", "-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags", linker_flags]
    with progress.step(f"building {name}", cost=Cost.FIRST_RUN, log=log):
        shell.run(["nice", "go", "build", *options, "-o", partial, package], log, environment=ENVIRONMENT, cwd=module)
        os.replace(partial, target)


def source_of(module: Path, path: str) -> Path:
    """The folder in Go's own cache with the source of a module that `module` requires."""
    found = shell.output(["go", "-C", module, "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", path])
    return Path(found.strip())
