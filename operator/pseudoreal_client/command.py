"""The command `pseudoreal`, also installed as `kubectl pseudoreal`.

Local commands belong to the trainer, commands for a cluster are here. Each module is imported when its command is
called: help and the commands for a cluster need neither torch nor numpy.
"""

import importlib
import os
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from pseudoreal_client.refusal import Refusal

_TRAINER = "pseudoreal_trainer.cli.command:main"


class _Found(NamedTuple):
    """Location of a command as module:name, and its help line. For a trainer command the path names the trainer's
    group."""

    path: str
    help: str


CLUSTER = {
    "get": _Found("pseudoreal_client.commands.show:get", "List the jobs on a cluster, or show one."),
    "describe": _Found("pseudoreal_client.commands.show:describe", "Say all there is to know of a job."),
    "watch": _Found("pseudoreal_client.commands.watch:watch", "Show a job live: phases, loss, ranks, what remains."),
    "logs": _Found("pseudoreal_client.commands.logs:logs", "Print what the ranks of a job say."),
    "submit": _Found("pseudoreal_client.commands.submit:submit", "Create the job in a file."),
    "suspend": _Found("pseudoreal_client.commands.change:suspend", "Save a checkpoint, free the pods and wait."),
    "resume": _Found("pseudoreal_client.commands.change:resume", "Go on with a suspended job."),
    "finish-phase": _Found("pseudoreal_client.commands.change:finish_phase", "End a phase now, with a checkpoint."),
    "repeat-phase": _Found("pseudoreal_client.commands.change:repeat_phase", "Train a phase again from its start."),
}
FILES = {
    "plan": _Found("pseudoreal_client.commands.plan:plan", "Say what a job needs, and whether a cluster has it."),
    "validate": _Found("pseudoreal_client.commands.validate:validate", "Check a job file; name line and column."),
}
LOCAL = {
    name: _Found(_TRAINER, line)
    for name, line in {
        "run": "Train the job in a file on this machine.",
        "measure-hardware": "Measure how fast this machine is, for plan --hardware.",
        "metrics": "Print the figures of all steps of a job.",
        "sample": "Print text that a checkpoint's model writes.",
        "inspect": "Say what a checkpoint holds.",
        "verify": "Compare the files of a checkpoint with its manifest.",
        "delink": "Give the layers of a checkpoint blocks of their own.",
        "export": "Write a checkpoint's weights for other programs.",
        "prune": "Remove checkpoints that a job does not keep.",
        "data": "Text to tokens: train a tokenizer, prepare token files.",
    }.items()
}
SECTIONS = {"Jobs on a cluster": CLUSTER, "Job files, and what they need": FILES, "On this machine": LOCAL}


class _Commands(click.Group):
    """Click group with lazy imports: a command's module is imported when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return [name for section in SECTIONS.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = next((section[cmd_name] for section in SECTIONS.values() if cmd_name in section), None)
        return _load(ctx, found, cmd_name) if found else None

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except Refusal as refusal:
            click.echo(refusal.sentence, err=True)
            ctx.exit(refusal.status)
        except OSError as error:
            if error.filename is None:  # from a connection, or from a pipe whose reader is gone
                raise
            click.echo(f"{os.fsdecode(error.filename)} cannot be read or written: {error.strerror}", err=True)
            ctx.exit(1)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete command names without click's default; the default would import every command."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [CompletionItem(name) for name in names] or super().shell_complete(ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        for title, section in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, found.help) for name, found in section.items()])


def _load(context: click.Context, found: _Found, name: str) -> click.Command | None:
    module, _, attribute = found.path.partition(":")
    try:
        command = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pseudoreal"):
            raise
        extra = "trainer" if found.path == _TRAINER else "client"
        raise Refusal(
            f"pseudoreal {name} needs {error.name}, which is not installed; pip install 'pseudoreal[{extra}]'"
        ) from error
    loaded: click.Command | None = command.get_command(context, name) if found.path == _TRAINER else command
    return loaded


@click.command(cls=_Commands)
def main() -> None:
    """Pseudo-to-real training: layers share weights at first and own them later.

    Commands for a cluster take -n, --context and --kubeconfig as kubectl does; `kubectl pseudoreal` is the same.
    """


if __name__ == "__main__":
    main(prog_name="pseudoreal")
