"""Writes docs/benchmarks.md from the raw results: `python -m tests.benchmarks.report`."""

from pathlib import Path

from pseudoreal_dev.progress import progress

from tests.benchmarks import depth, step_times
from tests.benchmarks.results import TRAINER, Machine, read

REPORT = Path("docs/benchmarks.md")
IMAGES = REPORT.parent / "images"
_INTRODUCTION = """# Benchmarks

Written by `make bench-trainer`, which measures everything anew. The raw numbers are in `benchmark-results/`."""


def main() -> None:
    results = read(TRAINER)
    sections = [_INTRODUCTION, _machine(results.machine), step_times.section(results, IMAGES), depth.section()]
    REPORT.write_text("\n\n".join(sections) + "\n")
    progress.note(f"wrote {REPORT}")


def _machine(machine: Machine) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return f"Machine: {machine.cores} cores ({machine.processor}), {machine.memory_gib} GiB of memory. {versions}."


if __name__ == "__main__":
    main()
