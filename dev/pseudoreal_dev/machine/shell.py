"""Runs programs: their output goes to a file, and a failure shows that file's end."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from pseudoreal_dev.machine.errors import DevError

TAIL_LINES = 30


class CommandFailed(DevError):
    """A program ended with an error; the message holds the last lines of its log and the log's path."""


def run(
    command: Sequence[str | Path],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> None:
    """Runs `command` to its end, appending its output to `log`. Raises CommandFailed on an exit code other than 0."""
    with open_log(log) as out:
        code = subprocess.run(
            _words(command), stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=cwd, env=_environment(environment)
        ).returncode
    if code != 0:
        raise CommandFailed(f"{_words(command)[0]} ended with exit code {code}.\n{tail(log)}")


def output(command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None) -> str:
    """What `command` prints. Raises CommandFailed, with what it said, on an exit code other than 0."""
    done = subprocess.run(
        _words(command), stdin=subprocess.DEVNULL, capture_output=True, text=True, env=_environment(environment)
    )
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip()
        raise CommandFailed(f"`{' '.join(_words(command))}` ended with exit code {done.returncode}: {said}")
    return done.stdout


def succeeds(command: Sequence[str | Path]) -> bool:
    """Whether `command` ends with exit code 0; what it prints is dropped."""
    return subprocess.run(_words(command), stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def open_log(log: Path) -> BinaryIO:
    """The file, opened for appending; its folder is made."""
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("ab")


def tail(log: Path) -> str:
    """The last lines of a log, under its path."""
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if log.exists() else []
    return "\n".join([f"The last lines of {log}:", *(f"  {line}" for line in lines)])


def _words(command: Sequence[str | Path]) -> list[str]:
    return [str(word) for word in command]


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, **(extra or {})}
