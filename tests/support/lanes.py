"""All tests, in two lanes side by side: `python -m tests.support.lanes [--deep] [-m MARKS]`.

Tests of units compute; those on an API server and on a cluster mostly wait. What judges whether something is slow is
marked `solo`, and runs when both lanes have ended. Each run of pytest leaves its results as XML in the cache.
"""

import argparse
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.machine import paths

from tests.support.durations import Result, in_words, read, table

FOLDER = paths.logs() / "tests"
NOTHING_RAN = 5
"""pytest's exit code."""


@dataclass(frozen=True)
class Lane:
    name: str
    folders: tuple[str, ...]
    marks: str

    @property
    def log(self) -> Path:
        return FOLDER / f"{self.name}.log"

    @property
    def results(self) -> Path:
        return FOLDER / f"{self.name}.xml"

    def start(self, marks: str, options: list[str], *, shown: bool) -> "subprocess.Popen[bytes]":
        """`shown`: what it says is seen at once; else it is in the log."""
        self.results.unlink(missing_ok=True)
        chosen = f"({self.marks}) and ({marks})" if marks else self.marks
        own = [f"--junitxml={self.results}", "-o", f"cache_dir=.pytest_cache/{self.name}"]
        command = [sys.executable, "-m", "pytest", *self.folders, "-m", chosen, *own, *options]
        with self.log.open("wb") as log:
            return subprocess.Popen(
                command,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                stdout=None if shown else log,
                stderr=None if shown else log,
            )


UNITS = Lane("units", ("tests/unit",), "not solo")
CLUSTER = Lane("cluster", ("tests/integration", "tests/e2e"), "not solo")
SOLO = Lane("solo", ("tests/unit",), "solo")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deep", action="store_true")
    parser.add_argument("-m", dest="marks", default="")
    chosen = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    codes = [*_run(chosen.marks, ["--deep", f"--seed={secrets.randbelow(10**9)}"] if chosen.deep else [])]
    return _say(codes, time.monotonic() - begin)


def _run(marks: str, options: list[str]) -> Iterator[tuple[Lane, int]]:
    """Lanes that have ended, with the exit codes of pytest."""
    cluster = CLUSTER.start(marks, options, shown=False)
    units = UNITS.start(marks, options, shown=True)
    yield UNITS, units.wait()
    print(f"waiting for tests/integration and tests/e2e; they write to {CLUSTER.log}", flush=True)
    yield CLUSTER, cluster.wait()
    sys.stdout.buffer.write(CLUSTER.log.read_bytes())
    sys.stdout.flush()
    yield SOLO, SOLO.start(marks, options, shown=True).wait()


def _say(codes: list[tuple[Lane, int]], seconds: float) -> int:
    """Prints a table and a summary like pytest's, which comes last: the exit code."""
    found: list[Result] = []
    for lane, _ in codes:
        found += read(lane.results) if lane.results.exists() else []
    print(*table(found, seconds), sep="\n")
    for result in found:
        if result.outcome in ("failed", "error"):
            print(f"{result.outcome.upper()} {result.test}")
    broken = [(lane, code) for lane, code in codes if code not in (0, 1, NOTHING_RAN)]
    for lane, code in broken:
        print(f"ERROR pytest {' '.join(lane.folders)} ended with exit code {code}")
    print(in_words(found, len(broken), seconds), flush=True)
    return 0 if found and all(code in (0, NOTHING_RAN) for _, code in codes) else 1


if __name__ == "__main__":
    sys.exit(main())
