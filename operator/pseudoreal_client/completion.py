"""`kubectl_complete-pseudoreal`: kubectl runs this program to complete words after `kubectl pseudoreal`.

The arguments are the words so far; the last word is to be completed. The output is a list of proposals and a directive,
in the format of cobra.
"""

import sys

from click.shell_completion import ShellComplete
from pseudoreal_trainer.cli.command import main as command

_FILES, _NO_FILES = 0, 4
"""Directives of cobra: ShellCompDirectiveDefault, which completes files, and ShellCompDirectiveNoFileComp."""


def main() -> None:
    *words, last = sys.argv[1:] or [""]
    found = ShellComplete(command, {}, "kubectl pseudoreal", "").get_completions(words, last)
    for item in found:
        if item.type == "plain":
            print(item.value)
    print(f":{_FILES if any(item.type != 'plain' for item in found) else _NO_FILES}")
