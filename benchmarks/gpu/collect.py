"""Examine, test and time a machine with a GPU in ten minutes, and pack the findings into one file to send back:
`python -m benchmarks.gpu.collect`.

The file is written again after each program: an interruption loses only the findings of the running program.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.results import DOCTOR_FILE, RESULTS_FILE

SECONDS = 580.0
"""Ten minutes, less the time for start and end."""
_STOP_SECONDS = 20.0
"""Time that a program may take beyond its limit: each ends its own tests and cases in time."""


@dataclass(frozen=True)
class Program:
    name: str
    module: str
    share: float
    """Share of the time left that the program may take."""
    result: str | None = None
    """File that the program writes; None: the program only prints."""
    can_be_tiny: bool = True


PROGRAMS = (
    Program("doctor", "benchmarks.gpu.doctor", 0.3, DOCTOR_FILE, can_be_tiny=False),
    Program("tests", "tests.gpu.run", 0.5),
    Program("bench", "benchmarks.gpu.bench", 1.0, RESULTS_FILE),
)


def main(arguments: Sequence[str], programs: Sequence[Program] = PROGRAMS) -> int:
    """Run the programs; return 0 if all of them ended with 0."""
    options = _options(arguments)
    end, failed = time.monotonic() + options.seconds, list[str]()
    with tempfile.TemporaryDirectory(prefix="pseudoreal-") as name:
        folder = Path(name)
        for program in programs:
            seconds = program.share * (end - time.monotonic())
            print(f"\n== {program.name}, at most {seconds:.0f} s", flush=True)
            if code := _run(program, seconds, options, folder):
                failed.append(f"{program.name} ended with exit code {code}")
            _pack(folder, options.out)
    print(*(failed or ["all passed"]), f"{options.out}: send this file back", sep="\n")
    return int(bool(failed))


def _run(program: Program, seconds: float, options: argparse.Namespace, folder: Path) -> int:
    """Run a program, and keep its output and its result in the folder; return its exit code."""
    command = [sys.executable, "-m", program.module, "--device", options.device, "--seconds", f"{seconds:.0f}"]
    command += ["--out", str(folder / program.result)] if program.result is not None else []
    command += ["--tiny"] if options.tiny and program.can_be_tiny else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    killer = threading.Timer(seconds + _STOP_SECONDS, process.kill)
    killer.start()
    assert process.stdout is not None, "the process has a pipe"
    with (folder / f"{program.name}.log").open("w") as log:
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
    code = process.wait()
    killer.cancel()
    return code


def _pack(folder: Path, file: Path) -> None:
    """Write all files of the folder into a ZIP file."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for one in sorted(folder.iterdir()):
            packed.write(one, one.name)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="collect", description="Doctor, tests and benchmark; one file to send back.")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="models so small that only the programs are tried")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="in all")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "."), "pseudoreal-gpu.zip"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
