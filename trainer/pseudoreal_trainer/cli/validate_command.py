"""`pseudoreal validate` and `pseudoreal schema`."""

from pathlib import Path

import click
from pseudoreal_api.publish import editor

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


@click.command()
def schema() -> None:
    """Print the JSON schema of a PseudoRealJob, for editors.

    A line in the job file names it: # yaml-language-server: $schema=FILE
    """
    click.echo(editor.to_json(), nl=False)
