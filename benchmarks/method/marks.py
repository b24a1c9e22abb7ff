"""Cost ratios of real machines, for the axis of the deciding picture: how many pseudo steps a real step takes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_trainer.cli.job_file import parse_job
from pseudoreal_trainer.estimate.report import plan_phase
from pseudoreal_trainer.estimate.time.hardware import read_profile

from benchmarks.method.arms import Study

_EXAMPLES = Path("examples")


@dataclass(frozen=True)
class Mark:
    study: Study
    name: str
    ratio: float
    """Seconds of a step of the last phase divided by those of the first."""
    origin: Literal["measured", "predicted"]
    source: str
    """Where the ratio comes from, in Markdown."""


_EARLIER = Mark(
    "dense",
    "this machine, state on disk",
    5.2,
    "measured",
    "[earlier trials](method-earlier.md): 12 layers of width 384, steps of 64 tokens",
)
_PLANNED: tuple[tuple[Study, str, str, str], ...] = (
    ("dense", "124 M on one GPU of 80 GB", "gpu/124m-pseudo-one-gpu", "gpu-machine"),
    ("experts", "235 B experts on 8 H200, host memory and drives", "gpu/moe-235b-one-node-of-h200", "h200-machine"),
    ("experts", "M6-10T on 512 V100", "m6-10t", "v100"),
    ("experts", "M6-10T on 512 H200", "m6-10t-h200", "h200"),
)
"""Study, name, job and profile of the machine."""


def marks() -> list[Mark]:
    """Return the marks, the planned ones by `pseudoreal plan` with assumed speeds. This takes half a minute."""
    return [_EARLIER, *(planned(*one) for one in _PLANNED)]


def planned(study: Study, name: str, job: str, hardware: str) -> Mark:
    file, profile = _EXAMPLES / f"{job}.yaml", _EXAMPLES / "hardware" / f"{hardware}.yaml"
    source = f"`pseudoreal plan {file} --hardware {profile}`"
    return Mark(study, name, _ratio(file, profile), "predicted", source)


def _ratio(file: Path, hardware: Path) -> float:
    """Return the predicted seconds of a step of the last phase divided by those of the first."""
    job, profile = parse_job(file), read_profile(hardware)
    seconds = []
    for index in (0, len(job.spec.phases) - 1):
        config = phase_config(job, index, execution=1, work_directory=".", offload_directory=".")
        # Threads count on CPUs alone; a fixed number makes the plan the same on every machine.
        seconds.append(plan_phase(config, "accelerator", profile, threads=1).timeline.seconds)
    return seconds[1] / seconds[0]
