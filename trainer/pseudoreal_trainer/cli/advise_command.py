"""The command `pseudoreal advise`."""

import json
import math
import sys
from pathlib import Path

import click
import yaml
from pseudoreal_api.wire.messages import ExitCode
from rich.console import Console

from pseudoreal_trainer.cli.advice_display import as_json, show, trial_text
from pseudoreal_trainer.cli.common import CommandError, ExitStatus, load
from pseudoreal_trainer.cli.job_file import only_job, read_job_file
from pseudoreal_trainer.cli.yaml_scalars import Dumper
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.estimate.advice.advice import Advice, Adviser, Json
from pseudoreal_trainer.estimate.advice.costs import Costs
from pseudoreal_trainer.estimate.advice.evidence import Trial, read_evidence
from pseudoreal_trainer.estimate.advice.trial import trial_jobs
from pseudoreal_trainer.estimate.time.hardware import read_profile

_PATH = click.Path(path_type=Path)
_STDIN = Path("-")


@click.command()
@click.argument("job", type=_PATH)
@click.option("--hardware", type=_PATH, help="Profile of a machine. Default: the job's, or an assumed machine.")
@click.option("--tokens", type=click.IntRange(1, 2**62), help="Budget: training without sharing for this many tokens.")
@click.option(
    "--days",
    type=click.FloatRange(0, 36_500, min_open=True),
    help="Budget: training without sharing for this many days.",
)
@click.option(
    "--from",
    "runs",
    type=_PATH,
    multiple=True,
    help="Folder with the runs of a trial, on which the advice is then based. May be repeated.",
)
@click.option("--trial", type=_PATH, help="Write the job files of a short trial on the job's text into this folder.")
@click.option("--output", type=_PATH, help="Write the job with the recommended phases into this file.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON; its keys are stable.")
def advise(
    job: Path,
    hardware: Path | None,
    tokens: int | None,
    days: float | None,
    runs: tuple[Path, ...],
    trial: Path | None,
    output: Path | None,
    is_json: bool,
) -> None:
    """Say whether phases with shared layers or with fewer layers would pay for the job in JOB.

    Candidates are compared with training without sharing, at the loss that this has after --tokens or --days. How
    many tokens a candidate needs is measured: in this project's trials, or in the runs of --from. How long a token
    takes is predicted. A candidate is recommended only if the lower end of its speed-up is above 1, and, if it
    shares weights, above the speed-up of training that starts with fewer layers.

    Exit code 78: the job is not valid, or its own model does not fit.
    """
    if (tokens is None) == (days is None):
        raise click.UsageError("give either --tokens or --days, the budget that candidates are compared at")
    if days is not None and math.isnan(days):
        raise click.UsageError("--days nan is no number of days; give one such as 2.5")
    _check_new(output, "--output")
    _check_new(trial, "--trial")
    if trial is not None and job == _STDIN:
        raise click.UsageError("--trial needs a file, whose folder paths of text start from; JOB is standard input")
    try:
        profile = read_profile(hardware) if hardware else None
        document = only_job(read_job_file(job))
        trials = _measured(runs) if runs else read_evidence().trials
        # On stderr, because stdout may be JSON for a program.
        with Console(stderr=True).status("planning") as status:
            costs = Costs(profile)
            adviser = Adviser(document.body, costs, lambda name: status.update(f"planning {name}"))
            advice = adviser.advise(trials, tokens=tokens, days=days)
    except ValueError as error:
        raise CommandError(str(error), ExitStatus.INVALID_JOB) from error
    if is_json:
        click.echo(json.dumps(as_json(advice, trials), indent=2))
    else:
        show(Console(), advice, trials, from_runs=bool(runs))
    if trial is not None:
        click.echo(_write_trial(advice, costs, job, trial), err=is_json)
    if output is not None:
        _write(output, advice.recommended.body)
        click.echo(
            f"{output}: the job with the phases of {advice.recommended.name}; comments, and other objects of {job},"
            " are not in it",
            err=is_json,
        )
    if advice.decision.verdict == "DoesNotFit":
        sys.exit(ExitCode.INVALID_JOB)


def _measured(runs: tuple[Path, ...]) -> tuple[Trial, ...]:
    # Imported here: folders of runs need numpy, and advice by the release's own trials does not.
    return tuple(load("pseudoreal_trainer.cli.trial_runs:read_trials", "advise --from")(runs))


def _check_new(path: Path | None, option: str) -> None:
    """Raise CommandError if there is something that would be overwritten."""
    if path is not None and path.exists() and not (path.is_dir() and option == "--trial" and not any(path.iterdir())):
        raise CommandError(f"{option} {path} exists already; choose another name", ExitStatus.INVALID_JOB)


def _write(path: Path, body: Json) -> None:
    text = yaml.dump(body, Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True)
    path.write_text(text, encoding="utf-8")


def _write_trial(advice: Advice, costs: Costs, job: Path, folder: Path) -> str:
    """Write the job files of a trial; return how many there are, how long they take, and how to run them."""
    try:
        jobs = trial_jobs(advice, job.resolve().parent)
    except InvalidJobError as error:
        raise CommandError(str(error), ExitStatus.INVALID_JOB) from error
    folder.mkdir(parents=True, exist_ok=True)
    for one in jobs:
        _write(folder / one.file, one.body)
    return trial_text(advice, costs, jobs, job, folder)
