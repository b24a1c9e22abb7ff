"""Needs of models of 1 B to 10 T parameters on different numbers of GPUs: `python -m tests.sizing` plans them, and
writes the tables of docs/sizing.md."""

import re
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_api.quantity import readable_bytes
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_trainer.cli.job_file import parse_job
from pseudoreal_trainer.estimate.time.hardware import HardwareProfile, read_profile

from tests.plans import Planned, planned_phases

_REPOSITORY = Path(__file__).parent.parent
_EXAMPLES = _REPOSITORY / "examples"
PAGE = _REPOSITORY / "docs" / "sizing.md"
_TABLE = re.compile(
    r"(?P<head><!-- (?P<name>\w+): written by python -m tests\.sizing -->\n).*?(?P<end><!-- end of )", re.S
)
_HEADS = (
    *(
        "GPUs",
        "phase",
        "parameters",
        "inputs of blocks",
        "sequences at a time",
        "state, of a GPU",
        "on a GPU, at most",
        "host of a rank",
    ),
    *("s a step", "tokens/s", "days for 100 B tokens", "fits"),
)
_TOKENS = 100e9


@dataclass(frozen=True)
class Size:
    """A job to plan. `workers`: numbers of machines; empty: those of the job, whose phases are planned as they are."""

    job: str
    profile: str
    workers: tuple[int, ...] = ()


SIZES = {
    "1b": Size("gpu/1b-one-node-of-8", "gpu-cluster", (1, 4)),
    "7b": Size("gpu/7b-eight-nodes", "gpu-cluster", (1, 2, 4, 8)),
    "70b": Size("gpu/70b-64-nodes", "gpu-cluster", (8, 16, 32, 64)),
    "10t": Size("m6-10t-h200", "h200"),
}
_AT_A_TIME = {"1b": 4, "7b": 4, "70b": 1}
"""Sequences that a GPU computes at a time."""


def with_tables(page: str) -> str:
    """Return the page with its tables as they are now."""
    return _TABLE.sub(lambda match: match["head"] + _table(match["name"]) + match["end"], page)


def _table(name: str) -> str:
    size = SIZES[name]
    job = parse_job(_EXAMPLES / f"{size.job}.yaml")
    profile = read_profile(_EXAMPLES / "hardware" / f"{size.profile}.yaml")
    plans = [_plan_on(job, workers, _AT_A_TIME[name], profile) for workers in size.workers]
    rows = [_row(phase) for phase in plans or planned_phases(job, profile)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (_HEADS, ("---",) * len(_HEADS), *rows))


def _plan_on(job: PseudoRealJob, workers: int, at_a_time: int, profile: HardwareProfile) -> Planned:
    """Plan the job's only phase on another number of machines, with the same batch.

    The inputs of all blocks and micro-batches stay on the device; where they do not fit, they go to the host.
    """
    for home in ("Device", "Host"):
        (planned,) = planned_phases(_on(job, workers, at_a_time, home), profile)
        if planned.report.fits:
            break
    return planned


def _on(job: PseudoRealJob, workers: int, at_a_time: int, home_of_inputs: str) -> PseudoRealJob:
    (phase,) = job.spec.phases
    batch = phase.batch.model_copy(update={"micro_batches": phase.batch.sequences // (8 * workers * at_a_time)})
    parallelism = phase.parallelism.model_copy(
        update={"state_sharding": "Full", "replicas": workers, "schedule": "Layered"}
    )
    kept = phase.activations.model_copy(update={"keep": "Inputs", "home": home_of_inputs})
    changes = {"workers": workers, "spares": 0, "batch": batch, "parallelism": parallelism, "activations": kept}
    spec = job.spec.model_copy(update={"phases": [phase.model_copy(update=changes)]})
    return job.model_copy(update={"spec": spec})


def _row(phase: Planned) -> tuple[str, ...]:
    config, report = phase.config, phase.report
    tokens_per_second = report.tokens_per_step / phase.duration.step_seconds
    sequences = config.batch.sequences // (config.batch.micro_batches * report.data_ranks)
    return (
        str(config.ranks),
        config.phase,
        f"{report.parameters:,}",
        config.activations.home,
        str(sequences),
        readable_bytes(report.bytes.device),
        readable_bytes(report.peak_device_bytes),
        readable_bytes(report.bytes.host),
        f"{phase.duration.step_seconds:.3g}",
        f"{tokens_per_second:,.0f}",
        f"{_TOKENS / tokens_per_second / 86400:.3g}",
        "yes" if report.fits else "no",
    )


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
