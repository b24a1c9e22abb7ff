"""What a process has taken of the machine, as the kernel counted it."""

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Usage:
    peak_bytes: int
    """Most bytes of memory that were resident at once."""
    seconds: float
    """Seconds of all processors."""


def usage(process: int) -> Usage:
    folder = Path("/proc", str(process))
    return parse((folder / "status").read_text(), (folder / "stat").read_text(), os.sysconf("SC_CLK_TCK"))


def parse(status: str, stat: str, ticks: int) -> Usage:
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    assert found, "the kernel tells it of every process that lives"
    # The name, in brackets, may have blanks in it; user and system time are the 14th and 15th fields.
    fields = stat.rpartition(")")[2].split()
    return Usage(1024 * int(found[1]), (int(fields[11]) + int(fields[12])) / ticks)


def busy_seconds() -> float:
    """Busy seconds of all processors since the machine began: whatever they did but wait."""
    return parse_busy(Path("/proc/stat").read_text(), os.sysconf("SC_CLK_TCK"))


def parse_busy(stat: str, ticks: int) -> float:
    user, nice, system, _idle, _waiting, *rest = map(int, stat.splitlines()[0].split()[1:9])
    return (user + nice + system + sum(rest)) / ticks
