"""The command `pseudoreal`, also installed as `kubectl pseudoreal`: one group of all commands.

A command's module is imported when the command is called: help and the commands for a cluster need neither torch nor
numpy. The commands for a cluster are in the package pseudoreal_client. They are named here and not imported, because
the image of a training pod has this package alone.
"""

import os
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from pseudoreal_trainer.cli.common import CommandError, ExitStatus, has_client, load
from pseudoreal_trainer.errors import InvalidJobError, TrainingError


class _Entry(NamedTuple):
    """Location of a command as module:name, and its line in the list of commands."""

    path: str
    help: str


CLUSTER = {
    "get": _Entry("pseudoreal_client.commands.show:get", "List the jobs on a cluster, or show one."),
    "describe": _Entry("pseudoreal_client.commands.show:describe", "Say all there is to know of a job."),
    "watch": _Entry("pseudoreal_client.commands.watch:watch", "Show a job live: phases, loss, ranks, what remains."),
    "logs": _Entry("pseudoreal_client.commands.logs:logs", "Print what the ranks of a job say."),
    "submit": _Entry("pseudoreal_client.commands.submit:submit", "Create the job in a file."),
    "suspend": _Entry("pseudoreal_client.commands.change:suspend", "Save a checkpoint, free the pods and wait."),
    "resume": _Entry("pseudoreal_client.commands.change:resume", "Go on with a suspended job."),
    "finish-phase": _Entry("pseudoreal_client.commands.change:finish_phase", "End a phase now, with a checkpoint."),
    "repeat-phase": _Entry("pseudoreal_client.commands.change:repeat_phase", "Train a phase again from its start."),
}
_HERE = "pseudoreal_trainer.cli"
FILES = {
    "plan": _Entry(f"{_HERE}.plan_command:plan", "Say what a job needs, and whether a cluster has it."),
    "validate": _Entry(f"{_HERE}.validate_command:validate", "Check a job file; name line and column."),
}
LOCAL = {
    "run": _Entry(f"{_HERE}.run_command:run", "Train the job in a file on this machine."),
    "measure-hardware": _Entry(
        f"{_HERE}.plan_command:measure_hardware", "Measure how fast this machine is, for plan --hardware."
    ),
    "metrics": _Entry(f"{_HERE}.run_command:metrics", "Print the figures of all steps of a job."),
    "sample": _Entry(f"{_HERE}.checkpoint_command:sample", "Print text that a checkpoint's model writes."),
    "inspect": _Entry(f"{_HERE}.checkpoint_command:inspect", "Say what a checkpoint holds."),
    "verify": _Entry(f"{_HERE}.checkpoint_command:verify", "Compare the files of a checkpoint with its manifest."),
    "delink": _Entry(f"{_HERE}.checkpoint_command:delink", "Give the layers of a checkpoint blocks of their own."),
    "export": _Entry(f"{_HERE}.checkpoint_command:export", "Write a checkpoint's weights for other programs."),
    "prune": _Entry(f"{_HERE}.checkpoint_command:prune", "Remove checkpoints that a job does not keep."),
    "data": _Entry(f"{_HERE}.data_command:data", "Text to tokens: train a tokenizer, prepare token files."),
}
SECTIONS = {"Jobs on a cluster": CLUSTER, "Job files, and what they need": FILES, "On this machine": LOCAL}


class _Commands(click.Group):
    """Click group with lazy imports, and the project's own errors as plain sentences."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return [name for section in _installed() for name in SECTIONS[section]]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        found = next((section[cmd_name] for section in SECTIONS.values() if cmd_name in section), None)
        command: click.Command | None = load(found.path, cmd_name) if found else None
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except InvalidJobError as error:
            raise CommandError(str(error), ExitStatus.INVALID_JOB) from error
        except TrainingError as error:
            raise CommandError(str(error)) from error
        except OSError as error:
            if error.filename is None:  # from a connection, or from a pipe whose reader is gone
                raise
            raise CommandError(f"{os.fsdecode(error.filename)} cannot be read or written: {error.strerror}") from error

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete command names without click's default; the default would import every command."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [CompletionItem(name) for name in names] or super().shell_complete(ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        for title in _installed():
            with formatter.section(title):
                formatter.write_dl([(name, entry.help) for name, entry in SECTIONS[title].items()])


def _installed() -> list[str]:
    """Return the titles of the sections whose commands are installed."""
    return [title for title, section in SECTIONS.items() if section is not CLUSTER or has_client()]


@click.command(cls=_Commands)
def main() -> None:
    """Pseudo-to-real training: layers share weights at first and own them later.

    Commands for a cluster take -n, --context and --kubeconfig as kubectl does; `kubectl pseudoreal` is the same.
    """


if __name__ == "__main__":
    main(prog_name="pseudoreal")
