"""Resources used by a process, as counted by the kernel."""

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Usage:
    peak_bytes: int
    """Peak resident bytes."""
    seconds: float
    """Processor seconds."""


def usage(process: int) -> Usage:
    folder = Path("/proc", str(process))
    return parse((folder / "status").read_text(), (folder / "stat").read_text(), os.sysconf("SC_CLK_TCK"))


def parse(status: str, stat: str, ticks: int) -> Usage:
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    assert found, "the kernel reports VmHWM for every living process"
    # The name, in parentheses, may contain blanks; user and system time are fields 14 and 15.
    fields = stat.rpartition(")")[2].split()
    return Usage(1024 * int(found[1]), (int(fields[11]) + int(fields[12])) / ticks)


def busy_seconds() -> float:
    """Return the busy seconds of all processors since boot, without idle time and I/O waits."""
    return parse_busy(Path("/proc/stat").read_text(), os.sysconf("SC_CLK_TCK"))


def parse_busy(stat: str, ticks: int) -> float:
    user, nice, system, _idle, _waiting, *rest = map(int, stat.splitlines()[0].split()[1:9])
    return (user + nice + system + sum(rest)) / ticks
