"""`pseudoreal suspend`, `resume`, `finish-phase` and `repeat-phase`."""

from collections.abc import Callable

import click

from pseudoreal_client.cluster.api import Conflict
from pseudoreal_client.cluster.connect import Connection
from pseudoreal_client.commands.options import job_argument, with_connection
from pseudoreal_client.view import changes
from pseudoreal_client.view.changes import Change
from pseudoreal_client.view.observed_job import ObservedJob

_TRIES = 10
"""Maximum number of attempts to patch a job. The operator writes the status every few seconds, so a patch of the object
just read rarely conflicts twice."""


@click.command()
@job_argument()
@with_connection
def suspend(connection: Connection, name: str) -> None:
    """Suspend the job NAME: it saves a checkpoint and frees its pods."""
    _change(connection, name, changes.suspend)


@click.command()
@job_argument()
@with_connection
def resume(connection: Connection, name: str) -> None:
    """Resume the suspended job NAME from its checkpoint."""
    _change(connection, name, changes.resume)


@click.command("finish-phase")
@job_argument()
@click.argument("phase", required=False)
@with_connection
def finish_phase(connection: Connection, name: str, phase: str | None) -> None:
    """End PHASE of the job NAME now, with a committed checkpoint. Default: the phase in training."""
    _change(connection, name, lambda job: changes.finish_phase(job, phase))


@click.command("repeat-phase")
@job_argument()
@click.argument("phase")
@with_connection
def repeat_phase(connection: Connection, name: str, phase: str) -> None:
    """Train PHASE of the job NAME again from the checkpoint that it started from, and all phases after it.

    Checkpoints of the earlier training are removed when the new one commits its first.
    """
    _change(connection, name, lambda job: changes.repeat_phase(job, phase))


def _change(connection: Connection, name: str, wanted: Callable[[ObservedJob], Change]) -> None:
    for left in reversed(range(_TRIES)):
        job = ObservedJob(connection.api.job(connection.namespace, name))
        change = wanted(job)
        try:
            connection.api.patch_job(connection.namespace, name, change.patch(job))
        except Conflict:
            if not left:
                raise
        else:
            click.echo(change.effect)
            return
