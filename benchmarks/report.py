"""Write the pages of docs/benchmarks/, and their claims, from the raw results: `python -m benchmarks.report`.

Sections and claims without raw results stay unchanged.
"""

from collections.abc import Callable
from pathlib import Path

from benchmarks import checkpoints, claims, depth, pages, predictions, step_times, versions_results
from benchmarks.data import report as data_report
from benchmarks.data.results import DATA
from benchmarks.data.results import read as read_data
from benchmarks.gpu import report as gpu_report
from benchmarks.machine import stamp_of, stamped
from benchmarks.moe import report as losses_report
from benchmarks.moe import steps_report
from benchmarks.moe.results import STEPS
from benchmarks.moe.results import read as read_steps
from benchmarks.operator import results as operator_results
from benchmarks.operator.beside import report as beside_report
from benchmarks.operator.beside.results import BESIDE
from benchmarks.operator.beside.results import read as read_beside
from benchmarks.pages import IMAGES, put_section
from benchmarks.results import TRAINER, read


def main() -> None:
    """Write every section that has raw results."""
    for results, write in _SECTIONS.items():
        if results.exists():
            write()


def _step_times() -> None:
    results = read(TRAINER)
    machine, versions = results.machine, ", ".join(f"{name} {of}" for name, of in results.machine.versions.items())
    measured = (
        f"The steps were timed on {machine.date}, at commit {machine.commit}, on {machine.hardware}, with {versions}."
    )
    put_section(pages.STEPS, f"{step_times.section(results, IMAGES)}\n\n{measured}")
    claims.put(step_times.claim(results))


def _versions() -> None:
    put_section(pages.STEPS, f"{versions_results.section()}\n\n{stamped(versions_results.VERSIONS)}")


def _depth() -> None:
    put_section(pages.STEPS, f"{depth.section()}\n\n{stamped(depth.DEPTH)}")


def _predictions() -> None:
    put_section(pages.PREDICTIONS, f"{predictions.section()}\n\n{stamped(predictions.PREDICTIONS)}")
    claims.put(predictions.claim(predictions.read(), stamp_of(predictions.PREDICTIONS)))


def _checkpoints() -> None:
    put_section(pages.CHECKPOINTS, f"{checkpoints.section()}\n\n{stamped(checkpoints.CHECKPOINTS)}")
    claims.put(checkpoints.claim(checkpoints.read(), stamp_of(checkpoints.CHECKPOINTS)))


def _data() -> None:
    results = read_data()
    assert results is not None, "the file exists"
    put_section(pages.DATA, data_report.section(results))
    claims.put(data_report.claim(results))


def _operator() -> None:
    put_section(pages.OPERATOR, operator_results.section())
    claims.put(operator_results.claim(operator_results.read().records))


def _beside() -> None:
    put_section(pages.OPERATOR, beside_report.section())
    claims.put(beside_report.claim(read_beside()))


def _mixtures() -> None:
    results = read_steps()
    assert results is not None, "the file exists"
    put_section(pages.MIXTURES, steps_report.section(results))
    if results.beside:
        claims.put(steps_report.claim(results))


_SECTIONS: dict[Path, Callable[[], None]] = {
    TRAINER: _step_times,
    versions_results.VERSIONS: _versions,
    depth.DEPTH: _depth,
    predictions.PREDICTIONS: _predictions,
    checkpoints.CHECKPOINTS: _checkpoints,
    DATA: _data,
    operator_results.OPERATOR: _operator,
    BESIDE: _beside,
    losses_report.LIVES: lambda: put_section(pages.MIXTURES, losses_report.section()),
    STEPS: _mixtures,
    gpu_report.GPU: lambda: put_section(pages.GPU, gpu_report.section()),
}
"""Raw results -> how to write their section, and their claim if the section compares."""

if __name__ == "__main__":
    main()
