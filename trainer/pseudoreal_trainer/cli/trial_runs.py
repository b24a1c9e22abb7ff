"""Reads the folders of a trial's runs, for `pseudoreal advise --from`."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.wire.messages import ProgressReport

from pseudoreal_trainer.cli.run_directory import RECORD, first_difference, recorded_job
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.estimate.advice.advice import parameters_of
from pseudoreal_trainer.estimate.advice.candidates import study_of
from pseudoreal_trainer.estimate.advice.evidence import Stage, Trial
from pseudoreal_trainer.estimate.advice.measured import Run, trials_of
from pseudoreal_trainer.training.metrics_file import METRICS_FILE, metrics_of

MOST_RUNS = 1000
_MOST_BYTES = {RECORD: 4 << 20, METRICS_FILE: 256 << 20}


def read_trials(folders: Sequence[Path]) -> list[Trial]:
    """Return the arms that the runs in the folders measured. A folder is the work directory of a run, or has such
    folders in it. Raises InvalidJobError if the runs are unfinished, too many, or not of one trial."""
    paths = list(islice((run for folder in folders for run in _runs_in(folder)), MOST_RUNS + 1))
    if len(paths) > MOST_RUNS:
        raise InvalidJobError(f"--from finds more than {MOST_RUNS:,} runs; give it the folders of one trial")
    jobs = {path: _job(path) for path in paths}
    first, *others = jobs.items()
    for path, job in others:
        difference = first_difference(_common(first[1]), _common(job), "spec")
        if difference is not None:
            raise InvalidJobError(
                f"{path} is of another trial than {first[0]}: {difference}; give --from the runs of one trial"
            )
    runs = [_run(path, job) for path, job in jobs.items()]
    real = _configs(first[1])[-1]
    return trials_of(runs, study_of(real.model), real.model.hidden_size, parameters_of(real))


def _runs_in(folder: Path) -> Iterator[Path]:
    if (folder / RECORD).is_file():
        yield folder
        return
    found = sorted(path.parent for path in folder.glob(f"*/{RECORD}"))
    if not found:
        raise InvalidJobError(
            f"--from {folder} has neither {RECORD} nor a folder with one; give it the --workdir of `pseudoreal run`"
        )
    yield from found


def _job(path: Path) -> PseudoRealJob:
    _check_size(path / RECORD)
    return recorded_job(path)


def _check_size(file: Path) -> None:
    size, most = file.stat().st_size, _MOST_BYTES[file.name]
    if size > most:
        raise InvalidJobError(f"{file} has {size:,} bytes, more than {most:,}; it is not of a short trial")


def _common(job: PseudoRealJob) -> dict[str, Any]:
    """Return what the jobs of a trial have in common."""
    spec = job.spec.to_dict()
    data = {key: value for key, value in spec["data"].items() if key != "seed"}
    optimizer = {key: value for key, value in spec["optimizer"].items() if key not in ("learningRate", "warmupSteps")}
    batch = {"batch": spec["phases"][-1]["batch"]}
    return {"model": spec["model"], "data": data, "optimizer": optimizer, "phases[-1]": batch}


def _configs(job: PseudoRealJob) -> list[PhaseConfig]:
    return [
        phase_config(job, index, execution=1, work_directory=".", offload_directory=".")
        for index in range(len(job.spec.phases))
    ]


def _run(path: Path, job: PseudoRealJob) -> Run:
    configs = _configs(job)
    ends: list[int] = []
    before = 0
    for config in configs:
        steps = config.phase_steps - before
        ends.append((ends[-1] if ends else 0) + steps * config.batch.sequences * config.model.sequence_length)
        before = config.phase_steps
    return Run(
        name=str(path),
        stages=tuple(_stage(config, end / ends[-1]) for config, end in zip(configs, ends, strict=True)),
        seed=job.spec.data.seed,
        rate=job.spec.optimizer.learning_rate,
        tokens=ends[-1],
        loss=_final_loss(path, configs[-1].total_steps),
    )


def _stage(config: PhaseConfig, until: float) -> Stage:
    layers, blocks = config.model.layers, config.sharing.blocks
    return Stage(
        until=round(until, 4),
        layers=layers,
        blocks=blocks,
        shares_experts=blocks < layers and config.sharing.shares_experts_alone,
        experts=config.model.experts.count if config.model.experts else None,
    )


def _final_loss(path: Path, steps: int) -> float:
    """Return the validation loss after the last step. Raises InvalidJobError if there is none."""
    if not (path / METRICS_FILE).is_file():
        raise InvalidJobError(
            f"{path} has no {METRICS_FILE}: nothing was trained; go on with `pseudoreal run … --workdir {path}"
            " --resume`, or leave it out"
        )
    _check_size(path / METRICS_FILE)
    try:
        newest = deque(metrics_of(path), maxlen=1)
        report = ProgressReport.model_validate_json(newest.pop() if newest else "")
    except ValueError as error:  # no JSON of a report, or no UTF-8
        raise InvalidJobError(
            f"{path / METRICS_FILE} has no step in its last line; go on with `pseudoreal run … --resume`"
        ) from error
    if report.step != steps:
        raise InvalidJobError(
            f"{path} is at step {report.step} of {steps}; go on with `pseudoreal run … --workdir {path} --resume`, or"
            " leave it out"
        )
    if report.validation_loss is None or not math.isfinite(report.validation_loss):
        raise InvalidJobError(f"{path} has no finite validation loss after its last step, so it compares with nothing")
    return report.validation_loss
