"""The machine, as the kernel describes it, and the versions of what is compared."""

import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel

from tests.benchmarks.results import Machine


class Stamp(BaseModel, frozen=True):
    date: str
    commit: str


COMPARED = ("torch", "deepspeed")


def describe(compared: Sequence[str] = COMPARED) -> Machine:
    """The machine, and the versions of the packages that are compared."""
    return Machine(
        processor=processor(),
        cores=cores(),
        memory_gib=memory_gib(),
        date=datetime.now(UTC).date().isoformat(),
        commit=commit(),
        versions={"python": platform.python_version(), **{package: version(package) for package in compared}},
    )


def stamp(path: Path) -> None:
    """Says beside a file of results when and of what they are."""
    _beside(path).write_text(stamp_of_today().model_dump_json() + "\n")


def stamp_of_today() -> Stamp:
    return Stamp(date=datetime.now(UTC).date().isoformat(), commit=commit())


def stamped(path: Path) -> str:
    """The sentence of the report on it."""
    try:
        found = Stamp.model_validate_json(_beside(path).read_bytes())
    except FileNotFoundError:
        found = Stamp(date="an unknown day", commit="an unknown commit")
    return f"Measured on {found.date}, at {found.commit}."


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.stem}-measured.json")


def commit() -> str:
    """Commit of the tree that is measured; with a plus when files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=9"], capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "an unknown commit"


def processor() -> str:
    return _entry("cpuinfo", r"model name\s*:\s*(.+)")


def memory_gib() -> float:
    return round(int(_entry("meminfo", r"MemTotal:\s*(\d+) kB")) / 2**20, 1)


def cores() -> int:
    return len(re.findall(r"^processor\s*:", Path("/proc/cpuinfo").read_text(), re.MULTILINE))


def _entry(file: str, pattern: str) -> str:
    """The first match in a file of /proc; "unknown" on kernels that do not tell."""
    found = re.search(pattern, Path("/proc", file).read_text())
    return found[1] if found else "unknown"
