"""The command `pseudoreal`."""

import sys
from pathlib import Path

import click
from pseudoreal_api.wire.messages import ExitCode
from rich.console import Console

from pseudoreal_trainer.cli import checkpoint_command, data_command, plan_command
from pseudoreal_trainer.cli.display import Display, summary
from pseudoreal_trainer.cli.job_file import notice, read_job
from pseudoreal_trainer.cli.local_run import LocalRun, PodFailed, use_endpoint
from pseudoreal_trainer.cli.run_directory import RunDirectory, open_run
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.storage.path import storage_path
from pseudoreal_trainer.training.metrics_file import METRICS_FILE, metrics_of


@click.group()
def main() -> None:
    """Pseudo-to-real training: layers share weights at first and own them later."""


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--workdir", type=click.Path(path_type=Path), help="Default: pseudoreal-runs/NAME OF THE JOB.")
@click.option("--resume", is_flag=True, help="Go on with the run that the work directory holds.")
@click.option("--trace", type=click.Path(path_type=Path), help="Folder for what every rank did, for Perfetto.")
def run(file: Path, workdir: Path | None, resume: bool, trace: Path | None) -> None:
    """Train the PseudoRealJob in FILE on this machine, phase after phase."""
    console = Console()
    try:
        job = read_job(file)
        directory = open_run(workdir or Path("pseudoreal-runs") / job.metadata.name, job, resume=resume)
    except InvalidJobError as error:
        click.echo(str(error), err=True)
        sys.exit(ExitCode.INVALID_JOB)
    click.echo(notice(job.spec))
    use_endpoint(job.spec.checkpoint.storage)
    display = Display(console)
    try:
        with display:
            LocalRun(directory, display.hear, trace).run()
    except PodFailed as failed:
        _say_failure(failed, directory, file, workdir)
        sys.exit(failed.message.exit_code)
    except TrainingError as error:
        click.echo(str(error), err=True)
        sys.exit(ExitCode.FAILED)
    except OSError as error:
        click.echo(f"the work directory {directory.path} cannot be read or written to: {error}", err=True)
        sys.exit(ExitCode.FAILED)
    _say_success(console, directory, display)


def _say_failure(failed: PodFailed, directory: RunDirectory, file: Path, workdir: Path | None) -> None:
    message = failed.message
    where = f" --workdir {workdir}" if workdir else ""
    click.echo(f"phase {message.phase}: {message.outcome}: {message.message}", err=True)
    if message.outcome == "Failed":
        click.echo(f"logs of the processes: {directory.path / 'pods'}", err=True)
    if message.outcome != "InvalidJob":
        click.echo(f"go on with: pseudoreal run {file}{where} --resume", err=True)


def _say_success(console: Console, directory: RunDirectory, display: Display) -> None:
    console.print(summary(directory, display.seconds))
    if display.baseline is not None:
        click.echo(f"order-2 model of the same bytes: {display.baseline:.4f} nats per byte")
    if display.sample is not None:
        click.echo(f"sample, after {display.sample['prompt']!r}:\n{display.sample['text']}")
    click.echo(f"checkpoints: {directory.store.folder}\nmetrics: {directory.path / METRICS_FILE}")


@main.command(cls=checkpoint_command.Command)
@click.argument("checkpoint", type=checkpoint_command.CHECKPOINT)
@click.option("--prompt", default="\n", help="Text to go on from.")
@click.option("--tokens", "count", default=300, show_default=True, type=click.IntRange(min=1))
@click.option("--tokenizer", "path", help="tokenizer.json or its folder. Default: the job's.")
@click.option("--temperature", default=0.8, show_default=True, type=click.FloatRange(min=0), help="0: no chance.")
@click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(0, 1, min_open=True))
@click.option("--seed", default=0, show_default=True)
def sample(
    checkpoint: checkpoint_command.Opened,
    prompt: str,
    count: int,
    path: str | None,
    temperature: float,
    top_p: float,
    seed: int,
) -> None:
    """Print text that the model in the folder or s3:// URL CHECKPOINT writes."""
    from pseudoreal_trainer.data.tokenizer.kept import kept_tokenizer
    from pseudoreal_trainer.data.tokenizer.tokenizer import BYTES, load_tokenizer
    from pseudoreal_trainer.model.sampling import Sampling, generate, readable
    from pseudoreal_trainer.model.transformer import Transformer
    from pseudoreal_trainer.training.start import load_weights

    manifest = checkpoint.manifest
    with kept_tokenizer(checkpoint.store.work_directory) as kept:
        if manifest.consumed is not None and path is None and kept is None:
            raise click.UsageError("the model was trained on token files; name their tokenizer with --tokenizer")
        tokenizer = load_tokenizer(path or kept or BYTES)
    if tokenizer.vocabulary > manifest.model.vocabulary_size:
        raise click.UsageError(
            f"the tokenizer has {tokenizer.vocabulary:,} tokens and the model {manifest.model.vocabulary_size:,}; give"
            " the one that made its token files"
        )
    tokens = tokenizer.encode(prompt).tolist()
    if not tokens:
        raise click.UsageError("the prompt is empty; give it a character at least")
    checkpoint.store.verify(manifest)
    model = Transformer(manifest.model, manifest.sharing)
    load_weights(model, checkpoint.reader)
    sampling = Sampling(tokenizer.vocabulary, temperature, top_p, seed)
    written = generate(model, tokens, count, manifest.model.sequence_length, sampling)
    click.echo(prompt + readable(tokenizer.decode(written)))


@main.command()
@click.argument("folder")
def metrics(folder: str) -> None:
    """Print the figures of all steps of the job in FOLDER, one JSON object a line.

    FOLDER is a work directory, or the s3:// URL of the folder that holds checkpoints/.
    """
    try:
        for line in metrics_of(storage_path(folder)):
            click.echo(line)
    except (OSError, UnicodeDecodeError, TrainingError) as error:
        click.echo(f"no metrics: {error}", err=True)
        sys.exit(ExitCode.INVALID_JOB)


for command in (*plan_command.COMMANDS, *checkpoint_command.COMMANDS, *data_command.COMMANDS):
    main.add_command(command)

if __name__ == "__main__":
    main()
