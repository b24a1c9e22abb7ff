"""Writes docs/benchmarks.md from the raw results: `python -m tests.benchmarks.report`."""

from collections.abc import Callable
from pathlib import Path

from pseudoreal_dev.machine.progress import progress

from tests.benchmarks import checkpoints, depth, predictions, step_times, versions_results
from tests.benchmarks.gpu import report as gpu_report
from tests.benchmarks.machine import stamped
from tests.benchmarks.operator import results as operator_results
from tests.benchmarks.results import TRAINER, Machine, read

REPORT = Path("docs/benchmarks.md")
IMAGES = REPORT.parent / "images"
_INTRODUCTION = """# Benchmarks

Written by `make bench-trainer`, `make bench-checkpoint` and `make bench-operator`, which measure everything anew.
The raw numbers are in `benchmark-results/`."""
_FURTHER: dict[Path, Callable[[], str]] = {
    versions_results.VERSIONS: versions_results.section,
    depth.DEPTH: depth.section,
    predictions.PREDICTIONS: predictions.section,
    checkpoints.CHECKPOINTS: checkpoints.section,
    operator_results.OPERATOR: operator_results.section,
}
"""Sections of the report on what was measured here."""


def main() -> None:
    results = read(TRAINER)
    sections = [_INTRODUCTION, _machine(results.machine), step_times.section(results, IMAGES)]
    sections += [f"{section()}\n\n{stamped(path)}" for path, section in _FURTHER.items() if path.exists()]
    sections.append(gpu_report.section())
    REPORT.write_text("\n\n".join(sections) + "\n")
    progress.note(f"wrote {REPORT}")


def _machine(machine: Machine) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return (
        f"Step times were measured on {machine.date}, at {machine.commit}, on {machine.cores} cores"
        f" ({machine.processor}) with {machine.memory_gib} GiB of memory: {versions}."
    )


if __name__ == "__main__":
    main()
