"""Programs of the PATH that write down how they are called, and answer what a test says."""

import shlex
from collections.abc import Mapping
from pathlib import Path

# Variables that change what a program does; they are written down with the call.
_NOTED = ("KUBECONFIG", "BUILDX_NO_DEFAULT_ATTESTATIONS")


class Programs:
    """A folder that is the whole PATH, with programs for the shell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        self._calls = folder / "calls"
        self.state = folder / "state"
        self.state.mkdir()

    def add(self, name: str, answers: Mapping[str, str]) -> None:
        """Add a program, or replace it. `answers`: pattern of the arguments, as in the shell's `case` -> commands of
        the shell; the first one that fits is run, without one the program ends well. $STATE is a folder for what
        the programs of this test remember.
        """
        cases = "\n".join(f"{_pattern(arguments)}) {commands} ;;" for arguments, commands in answers.items())
        noted = "".join(f"${{{variable}:+{variable}=${variable} }}" for variable in _NOTED)
        program = self.folder / name
        program.write_text(
            f'#!/bin/sh\necho "{noted}{name} $*" >> {shlex.quote(str(self._calls))}\n'
            f'STATE={shlex.quote(str(self.state))}\ncase "$*" in\n{cases}\nesac\n'
        )
        program.chmod(0o755)

    def calls(self, program: str = "") -> list[str]:
        """Return the calls so far, oldest first, of one program or of all."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [line for line in lines if program in line.split()[:2] or not program]


def _pattern(arguments: str) -> str:
    """Quote all but the asterisks."""
    return "*".join(shlex.quote(part) if part else "" for part in arguments.split("*"))
