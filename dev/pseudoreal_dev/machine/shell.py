"""Runs programs with their output in a log file; an error shows the end of the file."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from pseudoreal_dev.machine.errors import DevError

TAIL_LINES = 30


class CommandFailed(DevError):
    """A program failed; the message contains the last lines of its log, or its output. `said`: its output alone, where
    it has no log."""

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(message)
        self.said = said


def run(
    command: Sequence[str | Path],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> None:
    """Run `command` to its end, appending its output to `log`. Raises CommandFailed on an exit code other than 0."""
    with open_log(log) as out:
        code = subprocess.run(
            _words(command), stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=cwd, env=_environment(environment)
        ).returncode
    if code != 0:
        raise CommandFailed(f"{_words(command)[0]} ended with exit code {code}.\n{tail(log)}")


def output(
    command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None, seconds: float | None = None
) -> str:
    """Return the output of `command`. Raises CommandFailed, with its output, on an exit code other than 0, or if it
    does not end within `seconds`."""
    line = " ".join(_words(command))
    try:
        done = subprocess.run(
            _words(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=_environment(environment),
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        said = f"no answer within {seconds:.0f} s"
        raise CommandFailed(f"`{line}` gave {said}", said) from error
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip()
        raise CommandFailed(f"`{line}` ended with exit code {done.returncode}: {said}", said)
    return done.stdout


def succeeds(command: Sequence[str | Path]) -> bool:
    """Return whether `command` ends with exit code 0; its output is discarded."""
    return subprocess.run(_words(command), stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def open_log(log: Path) -> BinaryIO:
    """Open the file for appending; create its folder if needed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("ab")


def tail(log: Path) -> str:
    """Return the path and the last lines of a log."""
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if log.exists() else []
    return "\n".join([f"The last lines of {log}:", *(f"  {line}" for line in lines)])


def _words(command: Sequence[str | Path]) -> list[str]:
    return [str(word) for word in command]


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, **(extra or {})}
