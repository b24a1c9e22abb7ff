"""Write docs/benchmarks.md from the raw results: `python -m benchmarks.report`.

Sections without results on this machine stay unchanged.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from pseudoreal_dev.machine.progress import progress

from benchmarks import checkpoints, depth, predictions, step_times, versions_results
from benchmarks.data import report as data_report
from benchmarks.data.results import DATA
from benchmarks.gpu import report as gpu_report
from benchmarks.gpu.report import with_section
from benchmarks.machine import stamped
from benchmarks.moe import report as moe_report
from benchmarks.operator import results as operator_results
from benchmarks.results import TRAINER, Machine, read

REPORT = Path("docs/benchmarks.md")
IMAGES = REPORT.parent / "images"
_INTRODUCTION = """# Benchmarks

Written by `make bench-trainer`, `make bench-checkpoint`, `make bench-data`, `make bench-moe` and `make bench-operator`;
each command measures its own sections again. The raw numbers are in `docs/data/`."""
_FURTHER: dict[Path, Callable[[], str]] = {
    versions_results.VERSIONS: versions_results.section,
    depth.DEPTH: depth.section,
    predictions.PREDICTIONS: predictions.section,
    checkpoints.CHECKPOINTS: checkpoints.section,
}
"""Results -> their section; date and commit are added here."""
_DATED: dict[Path, Callable[[], str]] = {
    DATA: data_report.section,
    operator_results.OPERATOR: operator_results.section,
    moe_report.LIVES: moe_report.section,
}
"""Results -> their section, which contains date and commit itself."""


def main() -> None:
    document = REPORT.read_text() if REPORT.exists() else ""
    if TRAINER.exists():
        results = read(TRAINER)
        document = _with_head(document, f"{_INTRODUCTION}\n\n{_machine(results.machine)}")
        document = with_section(document, step_times.section(results, IMAGES))
    for text in _sections():
        document = with_section(document, text)
    REPORT.write_text(document)
    progress.note(f"wrote {REPORT}")


def _sections() -> Iterator[str]:
    yield from (f"{section()}\n\n{stamped(path)}" for path, section in _FURTHER.items() if path.exists())
    yield from (section() for path, section in _DATED.items() if path.exists())
    if gpu_report.GPU.exists():
        yield gpu_report.section()


def _with_head(document: str, head: str) -> str:
    """Return the document with `head` in place of everything before the first section."""
    _, title, sections = document.partition("\n## ")
    return f"{head}\n{title}{sections}"


def _machine(machine: Machine) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return (
        f"Step times were measured on {machine.date}, at {machine.commit}, on {machine.cores} cores"
        f" ({machine.processor}) with {machine.memory_gib} GiB of memory: {versions}."
    )


if __name__ == "__main__":
    main()
