"""The command `pseudoreal report`."""

import time
from pathlib import Path

import click
from rich.console import Console

from pseudoreal_trainer.cli.common import CommandError, ExitStatus
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.report.job import jobs_of
from pseudoreal_trainer.report.page import html_of, page_of
from pseudoreal_trainer.report.reading import JobFiles, read_job_files
from pseudoreal_trainer.storage.path import storage_path

MOST_JOBS = 8
"""Most jobs on a page: it has as many colours."""


@click.command()
@click.argument("folders", metavar="FOLDER...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("report.html"),
    show_default=True,
    help="File for the page; an existing one is replaced.",
)
def report(folders: tuple[str, ...], output: Path) -> None:
    """Write a page about the job in FOLDER, or about several jobs side by side.

    FOLDER is a work directory, or the s3://, gs:// or az:// URL of the folder with checkpoints/. The page is one HTML
    file that loads nothing: curves, restarts, checkpoints, step plans and, of several jobs, the differences of their
    specs.
    """
    if len(folders) > MOST_JOBS:
        raise click.UsageError(f"{len(folders)} folders are too many for one page; give at most {MOST_JOBS}")
    twice = next((folder for folder in folders if folders.count(folder) > 1), None)
    if twice is not None:
        raise click.UsageError(f"{twice} is given twice; give each folder once")
    # On stderr, because stdout may go to another program.
    with Console(stderr=True).status("reading"):
        files = [_read(folder) for folder in folders]
        text = html_of(page_of(jobs_of(files)), time.time())
    output.write_text(text, encoding="utf-8")
    for each in files:
        for notice in each.notices:
            click.echo(f"{each.folder}: {notice}", err=True)
    click.echo(str(output))


def _read(folder: str) -> JobFiles:
    try:
        return read_job_files(storage_path(folder))
    except TrainingError as error:
        raise CommandError(f"no page: {error}", ExitStatus.INVALID_JOB) from error
