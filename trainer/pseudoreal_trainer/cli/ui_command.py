"""The command `pseudoreal ui`."""

import os
import socket
from contextlib import suppress
from pathlib import Path

import click

from pseudoreal_trainer.cli.common import ClusterOptions, CommandError, ExitStatus, cluster_options, load
from pseudoreal_trainer.storage.path import storage_path
from pseudoreal_trainer.ui.access import new_token
from pseudoreal_trainer.ui.folders import LocalRuns
from pseudoreal_trainer.ui.server import LiveServer
from pseudoreal_trainer.ui.view import Source


@click.command()
@click.argument("folder", required=False)
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="Show the jobs of all namespaces.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1. Default: a free one.")
@cluster_options
def ui(cluster: ClusterOptions, folder: str | None, everywhere: bool, port: int) -> None:
    """Show jobs live in a browser: those on a cluster, or those in the folders below FOLDER.

    The command prints an address, and serves it until Ctrl-C. Nothing is installed on the cluster: the page shows what
    your own rights allow, and changes nothing. FOLDER may be the s3://, gs:// or az:// URL of one job.
    """
    source = _local(folder, cluster, everywhere=everywhere) if folder else _remote(cluster, everywhere=everywhere)
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise CommandError(f"port {port} of 127.0.0.1 cannot be used: {reason}; choose another --port") from error
    token = new_token()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/?token={token}"
    click.echo(f"{source.labels.title}: {address}\nCtrl-C ends it.")
    with listener, suppress(KeyboardInterrupt):
        LiveServer(source, listener, token).run()


def _local(folder: str, cluster: ClusterOptions, *, everywhere: bool) -> Source:
    if everywhere or any(cluster):
        raise click.UsageError("FOLDER is on this machine; leave it out to show the jobs of a cluster")
    path = storage_path(folder)
    if isinstance(path, Path) and not path.is_dir():
        raise CommandError(f"there is no folder {folder}; give the folder with the runs", ExitStatus.INVALID_JOB)
    return LocalRuns(path)


def _remote(cluster: ClusterOptions, *, everywhere: bool) -> Source:
    if everywhere and cluster.namespace:
        raise click.UsageError("give -n or -A, not both")
    source: Source = load("pseudoreal_client.ui.cluster:cluster_jobs", "ui")(cluster, everywhere=everywhere)
    return source
