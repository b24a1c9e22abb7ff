"""Reference of all commands from their definitions in click: `python -m tests.commands` writes docs/commands.md."""

import inspect
from collections.abc import Iterator
from pathlib import Path

import click
from pseudoreal_trainer.cli.command import SECTIONS, main

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"
_HEAD = """# Commands

<!-- Written by `python -m tests.commands`. -->

`pseudoreal COMMAND --help` prints the same. `kubectl pseudoreal` is the same program. Exit codes, the choice of the
cluster and completion: [at a terminal](terminal.md).
"""


def page() -> str:
    """Return the page: a section for each group of commands, and in it each command with its options."""
    context = click.Context(main, info_name="pseudoreal")
    parts = [_HEAD]
    for title, names in SECTIONS.items():
        parts.append(f"\n## {title}\n")
        for name in names:
            command = main.get_command(context, name)
            assert command is not None, f"SECTIONS names commands that exist, such as {name}"
            parts.extend(_sections(command, click.Context(command, info_name=name, parent=context)))
    return "".join(parts)


def _sections(command: click.Command, context: click.Context) -> Iterator[str]:
    words = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"\n### `{context.command_path}`\n\n```text\n{words}\n```\n"
    yield from (f"\n{paragraph}\n" for paragraph in _paragraphs(command.help or ""))
    options = [option for option in command.get_params(context) if isinstance(option, click.Option)]
    records = [option.get_help_record(context) for option in options if option.name != "help"]
    rows = [f"| `{_cell(name)}` | {_cell(text)} |\n" for name, text in filter(None, records)]
    if rows:
        yield "\n| option | meaning |\n| --- | --- |\n" + "".join(rows)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, "a group has the commands that it lists"
            yield from _sections(inner, click.Context(inner, info_name=name, parent=context))


def _paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a help text in lines of at most 120 characters."""
    found = [click.wrap_text(" ".join(part.split()), width=110) for part in inspect.cleandoc(text).split("\n\n")]
    # A star or an underscore in a help text is no emphasis.
    return [part.replace("*", r"\*").replace("_", r"\_") for part in found]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(page())
