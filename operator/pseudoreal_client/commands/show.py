"""`pseudoreal get` and `pseudoreal describe`."""

import json
from collections.abc import Iterable, Iterator

import click
import yaml
from pseudoreal.client import Client
from pseudoreal.observed_job import ObservedJob
from pseudoreal_trainer.cli.yaml_scalars import Dumper

from pseudoreal_client.commands.options import job_argument, now, with_client
from pseudoreal_client.view.description import description
from pseudoreal_client.view.rows import table


@click.command()
@job_argument(required=False)
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="List the jobs of all namespaces.")
@click.option(
    "-o", "--output", type=click.Choice(["wide", "yaml", "json"]), help="Format of the output. Default: a table."
)
@with_client
def get(client: Client, name: str | None, everywhere: bool, output: str | None) -> None:
    """List the jobs, or show the job NAME."""
    if name and everywhere:
        raise click.UsageError("a job of that name may be in several namespaces; name one with -n, not -A")
    jobs = [client.observe(name)] if name else client.observe_all(all_namespaces=everywhere)
    bodies = [job.body for job in jobs]
    if output in ("yaml", "json"):
        shown = bodies[0] if name else {"apiVersion": "v1", "kind": "List", "items": bodies}
        click.echo(
            json.dumps(shown, indent=2) if output == "json" else yaml.dump(shown, Dumper=Dumper, sort_keys=False),
            nl=output == "json",
        )
    elif not bodies:
        where = "" if everywhere else f" in namespace {client.namespace}; -A lists those of all namespaces"
        click.echo(f"there are no jobs{where}", err=True)
    else:
        for line in table([*_readable(jobs)], now(), wide=output == "wide", namespaces=everywhere):
            click.echo(line)


def _readable(jobs: Iterable[ObservedJob]) -> Iterator[ObservedJob]:
    """Yield the jobs with a status readable by this release; report the others by name."""
    for job in jobs:
        if job.unreadable is None:
            yield job
        else:
            click.echo(f"job {job.name} in namespace {job.namespace} is left out: {job.unreadable}", err=True)


@click.command()
@job_argument()
@with_client
def describe(client: Client, name: str) -> None:
    """Show everything about the job NAME: phases, ranks and their nodes, faults, conditions, events."""
    job = client.observe(name)
    pods = job.current_pods(client.api.each("Pod", job.namespace, job.selector))
    events = client.api.each("Event", job.namespace, fields=f"involvedObject.uid={job.uid}")
    for line in description(job, pods, events, now()):
        click.echo(line)
