"""Time training steps on a GPU beside torch's fully_shard: `python -m benchmarks.gpu.bench`.

The run has a time budget: the most informative cases come first, and the result names the cases without time. The
result is written after every case.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu import machine
from benchmarks.gpu.budget import LEAST_SECONDS, within
from benchmarks.gpu.case import Request
from benchmarks.gpu.cases import Case, Suite, suite
from benchmarks.gpu.hardware import quick_profile
from benchmarks.gpu.results import RESULTS_FILE, Record, Results, loss_differences

BUDGET_SECONDS = 520.0
"""Nine minutes, less the time for start and end."""
_TAIL_LINES = 15
_DISK_BYTES = 30e9
"""Most bytes needed on the home disk."""


def main() -> None:
    options = _options()
    begin = time.monotonic()
    chosen, described = suite(tiny=options.tiny), machine.describe(options.device)
    print(f"{described.device}, driver {described.driver}, torch {described.versions['torch']}", flush=True)
    with tempfile.TemporaryDirectory(prefix="pseudoreal-", dir=options.folder) as folder:
        os.environ["TMPDIR"] = folder  # inherited by the processes of the cases
        profile = _measured_profile(options, chosen, Path(folder))
        run = _Processes(options, Path(folder), profile)
        records: list[Record] = []
        left = options.seconds - (time.monotonic() - begin)
        least = 0.0 if options.tiny else LEAST_SECONDS
        for record in within(left, chosen.cases, run, time.monotonic, least):
            print(_line(record), flush=True)
            records.append(record)
            found = Results(
                machine=described,
                is_tiny=options.tiny,
                budget_seconds=options.seconds,
                seconds=time.monotonic() - begin,
                disk=machine.file_system(Path(folder)),
                records=tuple(records),
            )
            options.out.write_text(found.model_dump_json(indent=1) + "\n")
    for model, apart in loss_differences(records).items():
        print(f"{model}: losses of both stacks differ by {apart:.1e} at most, relative")
    print(f"{options.out}: {len(records)} cases in {time.monotonic() - begin:.0f} s")


class _Processes:
    """Run each case in a process of its own: all memory is released afterwards, and a crash ends only its case."""

    def __init__(self, options: argparse.Namespace, folder: Path, profile: Path | None) -> None:
        self._options, self._folder, self._profile = options, folder, profile

    def __call__(self, case: Case, seconds: float) -> Record:
        result, log = self._folder / "result.json", self._folder / "log"
        result.unlink(missing_ok=True)
        request = Request(
            case=case,
            is_tiny=self._options.tiny,
            device=self._options.device,
            seconds=seconds - 2,
            folder=self._folder / "disk",
            profile=self._profile,
            result=result,
        )
        problem = _run(request, log, seconds)
        shutil.rmtree(request.folder, ignore_errors=True)
        found = Record(case=case, left_out=case.points)
        if result.exists():
            found = Record.model_validate_json(result.read_bytes())
        if problem is not None:
            print(*log.read_text(errors="replace").splitlines()[-_TAIL_LINES:], sep="\n", flush=True)
        return found.model_copy(update={"problem": found.problem or problem})


def _run(request: Request, log: Path, seconds: float) -> str | None:
    """Run the process; return the problem with the process itself, or None."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.case", request.model_dump_json()], stdout=out, stderr=out
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "stopped: its time was over"
    if code == 0:
        return None
    return f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _measured_profile(options: argparse.Namespace, chosen: Suite, folder: Path) -> Path | None:
    """Return the profile of this machine; None if its measurement fails. Steps are then timed without predictions."""
    points = [point for case in chosen.cases for point in case.points]
    tokens = [point.tokens // point.micro_batches for point in points if point.micro_batches > 1]
    begin = time.monotonic()
    try:
        found = quick_profile(machine.first_device(options.device), chosen.models.values(), [min(tokens), max(tokens)])
    except Exception as error:
        print(f"the machine could not be measured, so nothing is predicted: {error!r}", flush=True)
        return None
    file = folder / "profile.json"
    file.write_text(found.model_dump_json())
    print(f"measured the machine in {time.monotonic() - begin:.0f} s", flush=True)
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return file


def _line(record: Record) -> str:
    def point(tokens: int, seconds: float) -> str:
        return f"{tokens // 1024}k: {1000 * seconds:.0f} ms" if tokens >= 1024 else f"{tokens}: {1000 * seconds:.0f} ms"

    found = ", ".join(point(one.point.tokens, one.median) for one in record.measured)
    left = f"; left out: {len(record.left_out)} batches" if record.left_out else ""
    problem = f"; {record.problem}" if record.problem else ""
    return f"{record.case.label}: {found or 'nothing'}{left}{problem} ({record.seconds:.0f} s)"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description="Times training steps on a GPU.")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="models so small that only the program is tried")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "."), RESULTS_FILE))
    parser.add_argument("--folder", type=Path, help="for the home disk; a tmpfs with room for it, else the usual one")
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS, help="in all")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU that it can use; --device cpu --tiny tries the program without one")
    if options.folder is None:
        options.folder = _roomy_folder()
    return options


def _roomy_folder() -> Path | None:
    """Return a folder in memory with enough room; None means the default temporary folder."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > _DISK_BYTES else None


if __name__ == "__main__":
    main()
