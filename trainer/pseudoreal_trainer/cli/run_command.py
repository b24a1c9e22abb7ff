"""The commands `pseudoreal run` and `metrics`."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import click
from pseudoreal_api.base import ApiModel
from pseudoreal_api.spec.checkpoint import Checkpoint, Storage
from pseudoreal_api.spec.job import PseudoRealJob, PseudoRealJobSpec
from pydantic.alias_generators import to_camel
from rich.console import Console

from pseudoreal_trainer.cli.common import CommandError, ExitStatus
from pseudoreal_trainer.cli.display import Display, summary
from pseudoreal_trainer.cli.job_file import parse_job
from pseudoreal_trainer.cli.local_run import LocalRun, PodFailed, set_endpoint
from pseudoreal_trainer.cli.loss_picture import can_draw, draw_losses
from pseudoreal_trainer.cli.run_directory import RunDirectory, open_run
from pseudoreal_trainer.data.corpus import corpus_files
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.storage.path import storage_path
from pseudoreal_trainer.training.metrics_file import METRICS_FILE, metrics_of

_RECOVERY = ("restart", "hang", "deadlines", "clean_up", "requests", "suspend", "managed_by")
_CLUSTER_ONLY = ("pod", "network", "scheduling", *_RECOVERY)
_POD_ONLY = ("resources", "pod")
"""Fields of a phase that concern only the phase's pods."""


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--workdir", type=click.Path(path_type=Path), help="Folder of the run. Default: pseudoreal-runs/NAME OF THE JOB."
)
@click.option("--resume", is_flag=True, help="Continue the run in the work directory.")
@click.option("--trace", type=click.Path(path_type=Path), help="Folder for a trace of each rank, for Perfetto.")
def run(file: Path, workdir: Path | None, resume: bool, trace: Path | None) -> None:
    """Train the PseudoRealJob in FILE on this machine, phase after phase."""
    console = Console()
    job = read_job(file)
    directory = open_run(workdir or Path("pseudoreal-runs") / job.metadata.name, job, resume=resume)
    click.echo(ignored_fields(job.spec))
    set_endpoint(job.spec.checkpoint.storage)
    display = Display(console)
    try:
        with display:
            LocalRun(directory, display.show, trace).run()
    except PodFailed as failed:
        _print_failure(failed, directory, file, workdir)
        sys.exit(failed.message.exit_code)
    except OSError as error:
        raise CommandError(f"the work directory {directory.path} cannot be read or written to: {error}") from error
    _print_success(console, directory, display)


def read_job(path: Path) -> PseudoRealJob:
    """Read the file's only job and check it; relative paths of text and weights are resolved against the file's folder.

    Raises CommandError or InvalidJobError.
    """
    return with_paths_from(parse_job(path), path.resolve().parent)


def with_paths_from(job: PseudoRealJob, folder: Path) -> PseudoRealJob:
    """Return the job with relative paths of text and weights resolved against the folder. Raises InvalidJobError if
    there is no text."""
    data = job.spec.data.model_copy(update={"path": str(folder / job.spec.data.path)})
    if not data.sources:
        corpus_files(data)
    changes = {"data": data, "checkpoint": _with_weights(job.spec.checkpoint, folder)}
    return job.model_copy(update={"spec": job.spec.model_copy(update=changes)})


def _with_weights(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Return `checkpoint` with the path of the initial weights resolved against the folder, if the path is relative."""
    start = checkpoint.start_from
    if start is None or start.hugging_face is None or "://" in start.hugging_face.path:
        return checkpoint
    weights = start.hugging_face.model_copy(update={"path": str(folder / start.hugging_face.path)})
    return checkpoint.model_copy(update={"start_from": start.model_copy(update={"hugging_face": weights})})


def ignored_fields(spec: PseudoRealJobSpec) -> str:
    """Return a phrase with the fields of the file that a local run ignores."""
    ignored = [f"spec.{to_camel(field)}" for field in _CLUSTER_ONLY if _is_set(spec, field)]
    ignored += ["spec.data.volume"] if spec.data.volume is not None else []
    start = spec.checkpoint.start_from
    ignored += ["spec.checkpoint.startFrom.huggingFace.volume"] if start is not None and start.mounted else []
    ignored += [f"spec.phases[{p.name}].{field}" for field in _POD_ONLY for p in spec.phases if _is_set(p, field)]
    ignored += _ignored_storage(spec.checkpoint.storage)
    ignored += [f"spec.phases[{p.name}].offload.volume" for p in spec.phases if p.offload.volume is not None]
    return f"ignored in a local run: {', '.join(ignored) or 'nothing'}"


def _ignored_storage(storage: Storage) -> list[str]:
    ignored = ["spec.checkpoint.storage.volume"] if storage.volume is not None else []
    objects = storage.object_storage
    has_secret = objects is not None and objects.credentials_secret_name is not None
    return ignored + (["spec.checkpoint.storage.objectStorage.credentialsSecretName"] if has_secret else [])


def _is_set(model: ApiModel, field: str) -> bool:
    return field in model.model_fields_set


def _print_failure(failed: PodFailed, directory: RunDirectory, file: Path, workdir: Path | None) -> None:
    message = failed.message
    command = [_program(), "run", str(file), *(["--workdir", str(workdir)] if workdir else []), "--resume"]
    click.echo(f"phase {message.phase}: {message.outcome}: {message.message}", err=True)
    if message.outcome == "Failed":
        click.echo(f"logs of the processes: {directory.path / 'pods'}", err=True)
    if message.outcome != "InvalidJob":
        click.echo(f"go on with: {shlex.join(command)}", err=True)


def _program() -> str:
    """Return the word by which the user's shell finds this program: its path, if the shell would find none by name, or
    another one."""
    name, own = "pseudoreal", Path(sys.argv[0])
    found = shutil.which(name)
    is_elsewhere = own.name == name and not (found and own.samefile(found))
    return str(own) if is_elsewhere else name


def _print_success(console: Console, directory: RunDirectory, display: Display) -> None:
    console.print(summary(directory, display.seconds))
    if display.baseline is not None:
        click.echo(f"order-2 model of the same bytes: {display.baseline:.4f} nats per byte")
    if display.sample is not None:
        click.echo(f"sample, after {display.sample['prompt']!r}:\n{display.sample['text']}")
        last = directory.final_checkpoint(len(directory.job.spec.phases) - 1)
        assert last is not None, "every phase of a successful run has a final checkpoint"
        command = [_program(), "sample", str(directory.store.folder / last.name), "--prompt"]
        click.echo(f"more text: {shlex.join(command)} '...'")
    click.echo(f"checkpoints: {directory.store.folder}\nmetrics: {directory.path / METRICS_FILE}")
    click.echo(f"loss curve: {_draw(directory, display.baseline)}")


def _draw(directory: RunDirectory, baseline: float | None) -> str:
    """Draw the picture of the run's losses; return its path, or the reason why there is none."""
    picture = directory.path / "loss.png"
    if not can_draw():
        return "not drawn, because matplotlib is not installed"
    unit = "byte" if directory.job.spec.data.tokenizer.type == "Bytes" else "token"
    try:
        reports = [json.loads(line) for line in metrics_of(directory.path)]
        draw_losses(reports, picture, f"PseudoRealJob {directory.job.metadata.name}", unit, baseline)
    except Exception as error:  # whatever matplotlib lacks or raises: the run has succeeded all the same
        return f"not drawn: {type(error).__name__}: {error}"
    return str(picture)


@click.command()
@click.argument("folder")
def metrics(folder: str) -> None:
    """Print the metrics of all steps of the job in FOLDER, one JSON object per line.

    FOLDER is a work directory, or the s3:// URL of the folder with checkpoints/.
    """
    lines = metrics_of(storage_path(folder))
    while True:
        try:
            line = next(lines, None)
        except (OSError, UnicodeDecodeError, TrainingError) as error:
            raise CommandError(f"no metrics: {error}", ExitStatus.INVALID_JOB) from error
        if line is None:
            return
        click.echo(line)  # outside of `try`: if the reader of the output has enough, such as `head`, click ends
