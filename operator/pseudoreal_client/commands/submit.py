"""`pseudoreal submit`."""

from pathlib import Path

import click
from pseudoreal.client import Client
from pseudoreal.errors import NamespaceConflict, Rejected
from pseudoreal.observed_job import ObservedJob
from pseudoreal_trainer.cli.common import CommandError
from pseudoreal_trainer.cli.job_file import JobFile, invalid, only_job, read_job_file
from pseudoreal_trainer.cli.yaml_positions import Document

from pseudoreal_client.commands.options import with_client
from pseudoreal_client.commands.watch import print_until_end


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--wait", is_flag=True, help="Print the job's state until it ends; exit code 1 if it fails.")
@with_client
def submit(client: Client, file: Path, wait: bool) -> None:
    """Create the job in FILE, after a dry run on the cluster.

    FILE may be - for standard input. Other objects in it are not created; `kubectl apply` creates them.
    """
    read = read_job_file(file)
    job = only_job(read)
    if read.others:
        click.echo(f"left alone in {read.name}: {', '.join(read.others)}; kubectl apply -f makes them", err=True)
    _create(client, read, job, dry_run=True)
    made = _create(client, read, job, dry_run=False)
    name, namespace = made.name, made.namespace
    click.echo(f"job {name} is created in namespace {namespace}; pseudoreal watch {name} -n {namespace} shows it")
    if wait:
        print_until_end(client, namespace, name)


def _create(client: Client, file: JobFile, job: Document, *, dry_run: bool) -> ObservedJob:
    try:
        return client.create(job.body, dry_run=dry_run)
    except NamespaceConflict as conflict:
        raise CommandError(
            f"{file.name} says namespace {conflict.own}, and -n says {conflict.client}; remove one of them"
        ) from None
    except Rejected as rejected:
        raise invalid([job.fault(cause).text(file.name) for cause in rejected.causes or [rejected.message]]) from None
