"""Description of the machine from the kernel, and versions of the compared packages."""

import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from pseudoreal_dev.machine.version import read as version_of_project
from pydantic import BaseModel

from benchmarks.results import Machine


class Stamp(BaseModel, frozen=True):
    date: str
    commit: str
    release: str = "0"
    """Version of this project at the commit."""


COMPARED = ("torch", "deepspeed")


def describe(compared: Sequence[str] = COMPARED) -> Machine:
    """Return the machine's description with the versions of the compared packages."""
    return Machine(
        processor=processor(),
        cores=cores(),
        memory_gib=memory_gib(),
        date=datetime.now(UTC).date().isoformat(),
        commit=commit(),
        release=release(),
        versions={"python": platform.python_version(), **{package: version(package) for package in compared}},
    )


def stamp(path: Path) -> None:
    """Record date and commit beside a results file."""
    _beside(path).write_text(stamp_of_today().model_dump_json() + "\n")


def stamp_of_today() -> Stamp:
    return Stamp(date=datetime.now(UTC).date().isoformat(), commit=commit(), release=release())


def stamped(path: Path) -> str:
    """Return the report's sentence on date and commit of a results file."""
    found = stamp_of(path)
    return f"These figures were measured on {found.date}, at commit {found.commit}."


def stamp_of(path: Path) -> Stamp:
    try:
        return Stamp.model_validate_json(_beside(path).read_bytes())
    except FileNotFoundError:
        return Stamp(date="an unknown day", commit="an unknown commit")


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.stem}-measured.json")


def commit() -> str:
    """Return the measured commit; a trailing plus means modified files."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=9"], capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "an unknown commit"


def release() -> str:
    return str(version_of_project())


def hardware() -> str:
    return f"{cores()} cores ({processor()}), {memory_gib()} GiB of memory"


def processor() -> str:
    return _entry("cpuinfo", r"model name\s*:\s*(.+)")


def memory_gib() -> float:
    return round(int(_entry("meminfo", r"MemTotal:\s*(\d+) kB")) / 2**20, 1)


def cores() -> int:
    return len(re.findall(r"^processor\s*:", Path("/proc/cpuinfo").read_text(), re.MULTILINE))


def _entry(file: str, pattern: str) -> str:
    """Return the first match in a file of /proc; "unknown" if the kernel does not report it."""
    found = re.search(pattern, Path("/proc", file).read_text())
    return found[1] if found else "unknown"
