"""`pseudoreal submit`."""

from pathlib import Path
from typing import Any

import click
from pseudoreal_trainer.cli.common import CommandError
from pseudoreal_trainer.cli.job_file import JobFile, invalid, only_job, read_job_file
from pseudoreal_trainer.cli.yaml_positions import Document

from pseudoreal_client.cluster.connect import Connection
from pseudoreal_client.cluster.errors import Rejected
from pseudoreal_client.commands.options import with_connection
from pseudoreal_client.commands.watch import print_until_end

Json = dict[str, Any]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--wait", is_flag=True, help="Print the job's state until it ends; exit code 1 if it fails.")
@with_connection
def submit(connection: Connection, file: Path, wait: bool) -> None:
    """Create the job in FILE, after a dry run on the cluster.

    FILE may be - for standard input. Other objects in it are not created; `kubectl apply` creates them.
    """
    read = read_job_file(file)
    job = only_job(read)
    namespace = _namespace(job.body, connection, read.name)
    if read.others:
        click.echo(f"left alone in {read.name}: {', '.join(read.others)}; kubectl apply -f makes them", err=True)
    _create(connection, read, job, namespace, dry_run=True)
    name = _create(connection, read, job, namespace, dry_run=False)["metadata"]["name"]
    click.echo(f"job {name} is created in namespace {namespace}; pseudoreal watch {name} -n {namespace} shows it")
    if wait:
        print_until_end(connection, namespace, name)


def _namespace(body: Json, connection: Connection, file: str) -> str:
    """Return the namespace of the file, or else of the command line. Raises CommandError if they differ."""
    own = body["metadata"].get("namespace")
    if own and connection.is_named and own != connection.namespace:
        raise CommandError(f"{file} says namespace {own}, and -n says {connection.namespace}; remove one of them")
    return str(own or connection.namespace)


def _create(connection: Connection, file: JobFile, job: Document, namespace: str, *, dry_run: bool) -> Json:
    try:
        return connection.api.create_job(job.body, namespace, dry_run=dry_run)
    except Rejected as rejected:
        raise invalid([job.fault(cause).text(file.name) for cause in rejected.causes or [rejected.message]]) from None
