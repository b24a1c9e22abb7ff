"""`pseudoreal validate`."""

from pathlib import Path

import click

from pseudoreal_trainer.cli.job_file import invalid, read_job_file


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
def validate(files: tuple[Path, ...]) -> None:
    """Check the jobs in FILE without a cluster; print file, line and column of each fault.

    The rules are those of the cluster. FILE may be - for standard input. Exit code 78: a job is not valid.
    """
    faults: list[str] = []
    for file in map(read_job_file, files):
        found = file.faults()
        faults += found
        for job in [] if found else file.jobs:
            click.echo(f"{file.name}: job {job.body['metadata']['name']} is valid")
    if faults:
        raise invalid(faults)
