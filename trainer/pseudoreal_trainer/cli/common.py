"""Shared by all commands: error, options for a cluster, and lazy import of the commands' modules."""

import importlib
import importlib.util
from collections.abc import Callable
from enum import IntEnum
from functools import wraps
from typing import IO, Any, NamedTuple

import click
from pseudoreal_api.wire.messages import ExitCode

from pseudoreal_trainer.errors import how_to_install

_CLIENT = "pseudoreal_client"
_EXTRAS = {"ui": "ui"}
"""Command -> the package's extra with what it needs, where that is not `trainer`."""


class ExitStatus(IntEnum):
    """Exit codes of the commands. Exit code 2 is click's, for a wrong command line."""

    DONE = 0
    FAILED = 1
    NO_CLUSTER = 3
    FORBIDDEN = 4
    NOT_FOUND = 5
    NOT_INSTALLED = 6
    INVALID_JOB = ExitCode.INVALID_JOB


class CommandError(click.ClickException):
    """Error that ends the command: the sentence, with the remedy, goes to stderr, and `exit_code` to the shell."""

    def __init__(self, sentence: str, exit_code: ExitStatus = ExitStatus.FAILED) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code  # type: ignore[misc]  # click declares one for each class

    def show(self, file: IO[Any] | None = None) -> None:
        # Without click's prefix "Error: ".
        click.echo(self.message, file, err=True)


class ClusterOptions(NamedTuple):
    """Options that select the cluster and the namespace; None means that the kubeconfig decides."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add kubectl's options -n, --context and --kubeconfig; the command receives them as its first argument."""

    @wraps(command)
    def with_options(namespace: str | None, context: str | None, kubeconfig: str | None, **arguments: Any) -> None:
        command(ClusterOptions(namespace, context, kubeconfig), **arguments)

    for option in (
        click.option("--kubeconfig", help="Kubeconfig file, in place of the environment variable KUBECONFIG."),
        click.option("--context", help="Context of the kubeconfig. Default: the current one."),
        click.option("-n", "--namespace", help="Namespace of the job. Default: the one of the kubeconfig's context."),
    ):
        with_options = option(with_options)
    return with_options


def names_of_jobs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a job on the cluster."""
    try:
        found: list[str] = load(f"{_CLIENT}.commands.options:names_of_jobs", "")(context, parameter, incomplete)
    except CommandError:
        # Completion must not print errors.
        return []
    return found


def has_client() -> bool:
    """Return whether the package for commands on a cluster is installed; the image of a training pod lacks it."""
    return importlib.util.find_spec(_CLIENT) is not None


def load(path: str, command: str) -> Any:
    """Import `path`, a module and a name in it ("module:name"). Raises CommandError for a missing package; the error
    names `command`."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module.startswith(_CLIENT) and not has_client():
            missing = _CLIENT
        elif missing.startswith("pseudoreal"):  # a bug: the project's own modules are installed
            raise
        extra = "client" if module.startswith(_CLIENT) else _EXTRAS.get(command, "trainer")
        raise CommandError(
            f"pseudoreal {command} needs {missing}, which is not installed; {how_to_install(extra)}"
        ) from error
