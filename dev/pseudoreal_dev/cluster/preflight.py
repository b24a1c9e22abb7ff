"""Requirements on the machine, checked before anything is built; all problems are reported together."""

import os
import platform
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.cluster import binaries
from pseudoreal_dev.machine import go, packages, paths, shell
from pseudoreal_dev.machine.errors import DevError, Problem

GIB = 1024**3
COLD_DISK_GIB = 40
WARM_DISK_GIB = 10
MEMORY_GIB = 6
# A Unix socket's path is limited to 107 bytes, and containerd's socket is below the cache.
LONGEST_CACHE_PATH = 60


@dataclass(frozen=True)
class Machine:
    """Facts about the machine for the checks. `disk_free`, `memory_available`: bytes. `go`: version; "" if Go is not
    installed. `go_required`: the oldest that will do. `is_warm`: whether the cluster's programs are in the cache."""

    system: str
    is_root: bool
    disk_free: int
    memory_available: int
    has_apt_get: bool
    missing_packages: tuple[str, ...]
    go: str
    go_required: str
    is_warm: bool
    cache: Path


def require(more: Sequence[Problem] = ()) -> None:
    """Raise DevError with all problems of this machine and `more`, if there are any."""
    if found := [*problems(look()), *more]:
        lines = [f"- {problem}" for problem in found]
        raise DevError("\n".join(["This machine cannot run the local cluster yet:", *lines]))


def problems(machine: Machine) -> list[Problem]:
    if machine.system != "Linux":
        return [Problem(f"this is {machine.system}, and the cluster needs Linux", "Use a Linux machine or VM")]
    return [*_rights(machine), *_room(machine), *_programs(machine)]


def look() -> Machine:
    return Machine(
        system=platform.system(),
        is_root=os.geteuid() == 0,
        disk_free=shutil.disk_usage(_existing(paths.cache())).free,
        memory_available=_memory_available(),
        has_apt_get=shutil.which("apt-get") is not None,
        missing_packages=tuple(packages.missing()),
        go=_go_version(),
        go_required=go.oldest_for(binaries.required_go()),
        is_warm=shutil.which("go") is not None and binaries.are_cached(),
        cache=paths.cache(),
    )


def _rights(machine: Machine) -> list[Problem]:
    if machine.is_root:
        return []
    return [Problem("this is not root, who alone may make network namespaces and containers", "Use sudo")]


def _room(machine: Machine) -> list[Problem]:
    found = []
    disk = WARM_DISK_GIB if machine.is_warm else COLD_DISK_GIB
    if machine.disk_free < disk * GIB:
        found.append(
            Problem(
                f"{machine.disk_free / GIB:.0f} GiB are free at {machine.cache}, and {disk} are needed",
                "Make room, or set PSEUDOREAL_CACHE to a folder on a larger disk",
            )
        )
    if machine.memory_available < MEMORY_GIB * GIB:
        found.append(
            Problem(
                f"{machine.memory_available / GIB:.1f} GiB of memory are available, and {MEMORY_GIB} are needed",
                f"End other programs until {MEMORY_GIB} GiB are available, or use a larger machine",
            )
        )
    if len(str(machine.cache)) > LONGEST_CACHE_PATH:
        found.append(
            Problem(
                f"the cache path {machine.cache} is longer than {LONGEST_CACHE_PATH} characters",
                "Set PSEUDOREAL_CACHE to a shorter one",
            )
        )
    return found


def _programs(machine: Machine) -> list[Problem]:
    found = []
    if machine.missing_packages and not machine.has_apt_get:
        names = ", ".join(machine.missing_packages)
        found.append(Problem(f"{names} are missing, and there is no apt-get to install them", f"Install {names}"))
    if _numbers(machine.go) < _numbers(machine.go_required):
        have = f"Go is {machine.go}" if machine.go else "Go is missing"
        # sudo replaces the PATH by one without /usr/local/go/bin, where Go's own archive is unpacked.
        how = 'put it on the PATH (by sudo: sudo env "PATH=$PATH" make ...)'
        found.append(Problem(have, f"Install Go {machine.go_required} or newer and {how}"))
    return found


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def _memory_available() -> int:
    meminfo = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE) if meminfo.exists() else None
    return int(found.group(1)) * 1024 if found else 0


def _go_version() -> str:
    if shutil.which("go") is None:
        return ""
    return shell.output(["go", "env", "GOVERSION"]).strip().removeprefix("go")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
