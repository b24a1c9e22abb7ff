"""`pseudoreal logs`."""

import click
from pseudoreal.client import Client

from pseudoreal_client.commands.options import job_argument, with_client


@click.command()
@job_argument()
@click.option("--rank", type=click.IntRange(min=0), help="Print only the log of the pod with this rank.")
@click.option("-f", "--follow", is_flag=True, help="Follow the logs until the job ends, through all its executions.")
@click.option(
    "-p",
    "--previous",
    is_flag=True,
    help="Print the logs of the execution before the newest one, if its pods still exist.",
)
@click.option("--tail", type=click.IntRange(min=0), help="Print only this many newest lines of each pod. Default: all.")
@with_client
def logs(client: Client, name: str, rank: int | None, follow: bool, previous: bool, tail: int | None) -> None:
    """Print the logs of the job NAME: all pods of its newest execution, each line with a prefix."""
    if follow and previous:
        raise click.UsageError("an execution that is over says no more; leave out --follow or --previous")
    try:
        for line in client.logs(name, rank=rank, previous=previous, follow=follow, tail=tail):
            click.echo(f"{line.prefix}{line.text}")
    except KeyboardInterrupt:
        if not follow:
            raise
