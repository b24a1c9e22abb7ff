"""Go modules of this repository with pinned programs, and the build of these programs with the machine's Go."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from pseudoreal_dev.machine import paths, shell
from pseudoreal_dev.machine.content_hash import hash_files
from pseudoreal_dev.machine.progress import Cost, progress

TOOLCHAIN = os.environ.get("GOTOOLCHAIN", "auto")
"""Whether Go may fetch the newer Go that a go.mod names. The packages of Debian and Ubuntu do so only if it is said."""
OLDEST_FETCHING = "1.21.0"
"""Oldest release that can."""
# A lazier garbage collector saves compile time and uses more memory; memory is plentiful.
ENVIRONMENT = {"CGO_ENABLED": "0", "GOGC": "400", "GOTOOLCHAIN": TOOLCHAIN}
STRIPPED = "-s -w"
"""Linker flags for omitting debug information."""


def folder_of(module: Path, sources: Sequence[str] = ()) -> Path:
    """Return the cache folder for builds of a module, named by a hash of its go.mod and go.sum, of `sources` (glob
    patterns), and of the compiler's version, if there is a compiler."""
    compiler = shell.output(["go", "version"]) if shutil.which("go") else ""
    return paths.binaries() / hash_files(module, ["*.mod", "*.sum", *sources], [compiler])


def oldest_for(required: str) -> str:
    """Return the oldest Go that builds a module which requires the Go `required`."""
    return required if TOOLCHAIN == "local" else OLDEST_FETCHING


def download(module: Path, packages: Sequence[str]) -> None:
    log = paths.logs() / "go-mod-download.log"
    with progress.step("downloading Go modules", cost=Cost.FIRST_RUN, log=log):
        # `go list` fetches just the modules that the programs need; `go mod download` would fetch all.
        shell.run(["go", "list", "-deps", "-f", "", *packages], log, environment=ENVIRONMENT, cwd=module)


def build(module: Path, package: str, target: Path, *, linker_flags: str = STRIPPED) -> None:
    """Build a program. An interrupted build leaves nothing at `target`."""
    name, log = target.name, paths.logs() / f"build-{target.name}.log"
    partial = target.with_name(f".{name}.partial")
    # nice: other work on the machine takes precedence.
    options = ["-v", "-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags", linker_flags]
    with progress.step(f"building {name}", cost=Cost.FIRST_RUN, log=log):
        shell.run(["nice", "go", "build", *options, "-o", partial, package], log, environment=ENVIRONMENT, cwd=module)
        os.replace(partial, target)


def source_of(module: Path, path: str) -> Path:
    """Return the folder in Go's own cache with the source of a module required by `module`."""
    wanted = ["-mod=readonly", "-m", "-f", "{{.Dir}}", path]
    found = shell.output(["go", "-C", module, "list", *wanted], environment=ENVIRONMENT)
    return Path(found.strip())
