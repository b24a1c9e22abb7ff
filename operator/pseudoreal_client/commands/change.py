"""`pseudoreal suspend`, `resume`, `finish-phase` and `repeat-phase`."""

import click
from pseudoreal.client import Client

from pseudoreal_client.commands.options import job_argument, with_client


@click.command()
@job_argument()
@with_client
def suspend(client: Client, name: str) -> None:
    """Suspend the job NAME: it saves a checkpoint and frees its pods."""
    click.echo(client.suspend(name))


@click.command()
@job_argument()
@with_client
def resume(client: Client, name: str) -> None:
    """Resume the suspended job NAME from its checkpoint."""
    click.echo(client.resume(name))


@click.command("finish-phase")
@job_argument()
@click.argument("phase", required=False)
@with_client
def finish_phase(client: Client, name: str, phase: str | None) -> None:
    """End PHASE of the job NAME now, with a committed checkpoint. Default: the phase in training."""
    click.echo(client.finish_phase(name, phase))


@click.command("repeat-phase")
@job_argument()
@click.argument("phase")
@with_client
def repeat_phase(client: Client, name: str, phase: str) -> None:
    """Train PHASE of the job NAME again from the checkpoint that it started from, and all phases after it.

    The checkpoints of the earlier training are removed when the new training commits its first checkpoint.
    """
    click.echo(client.repeat_phase(name, phase))
