"""Prints a job's progress as lines, until the job ends."""

import time

import click
from pseudoreal_trainer.cli.common import CommandError

from pseudoreal_client.cluster.connect import Connection
from pseudoreal_client.commands.options import now
from pseudoreal_client.view.seen import SeenJob
from pseudoreal_client.view.story import story

LOOK_SECONDS = 2.0


def tell_until_end(connection: Connection, namespace: str, name: str) -> None:
    """Print a line whenever the job's summary has changed. Raises CommandError if the job fails."""
    told: str | None = None
    try:
        while True:
            job = SeenJob(connection.api.job(namespace, name))
            said = story(job, now())
            if said != told:
                click.echo(said)
            told = said
            if job.is_over:
                break
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        raise CommandError(f"the job goes on; pseudoreal watch {name} -n {namespace} shows it") from None
    check_success(job)


def check_success(job: SeenJob) -> None:
    """Raise CommandError if the job has failed."""
    if job.status.state == "Failed":
        raise CommandError(
            f"job {job.name} failed; pseudoreal describe {job.name} -n {job.namespace} says what to change"
        )
