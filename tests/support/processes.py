"""Processes with a time limit, forked from a server with their modules already imported.

They have the environment of the server, not of the test. A process exceeding its limit reports the stacks of its
threads; the stacks of all processes explain a deadlock.
"""

import atexit
import faulthandler
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
LIMIT_SECONDS = 600.0
"""Time limit in seconds. Most processes take less than half a minute on two quiet processors; the rest is a margin for
a machine with a third of the speed and other builds at the same time."""
_SHOW = signal.SIGUSR1
_imported: list[str] = []


def preload(*modules: str) -> None:
    """Add modules to be imported by the server at its start. The first process starts the server."""
    _imported.extend(modules)
    CONTEXT.set_forkserver_preload([*_imported])


class Forked:
    """`act(*arguments)` in a separate process, with its output in `log`, by default a private file."""

    def __init__(self, act: Callable[..., object], *arguments: Any, log: Path | None = None) -> None:
        self._stacks, self.log = new_file(), log or new_file()
        # A daemon process ends with the program that has started it.
        self._process = CONTEXT.Process(target=_noted, args=(self._stacks, self.log, act, arguments), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "`__init__` has started the process"
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code; -N after signal N; None while the process runs."""
        return self._process.exitcode

    def wait(self, seconds: float = LIMIT_SECONDS) -> int:
        """Return the exit code. Kills the process and raises TimeoutError, with its stacks, if it does not end."""
        return wait_for_all([self], seconds)[0]

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; no effect if the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def ends_within(self, seconds: float) -> bool:
        self._process.join(max(0.0, seconds))
        return self._process.exitcode is not None

    def stacks(self) -> str:
        return stacks_of(self.pid, self._stacks)


def succeed(processes: Iterable[Forked], seconds: float = LIMIT_SECONDS) -> None:
    """Wait until all processes have ended, and fail the test with the logs of the failed ones."""
    everybody = [*processes]
    codes = wait_for_all(everybody, seconds)
    bad = [f"exit code {code}: {one.log.read_text()}" for code, one in zip(codes, everybody, strict=True) if code]
    assert not bad, "\n".join(bad)


def wait_for_all(processes: Iterable[Forked], seconds: float = LIMIT_SECONDS) -> list[int]:
    """Return the exit codes. After the time limit, kills the remaining processes and raises TimeoutError with their
    stacks."""
    everybody, until = [*processes], time.monotonic() + seconds
    stuck = [one for one in everybody if not one.ends_within(until - time.monotonic())]
    if stuck:
        said = "\n".join(one.stacks() for one in stuck)
        for one in stuck:
            one.kill()
        raise TimeoutError(f"after {seconds:.0f} s {len(stuck)} of {len(everybody)} processes have not ended\n{said}")
    return [one.poll() or 0 for one in everybody]


def note_stacks(file: Path) -> None:
    """Make this process write the stacks of its threads to the file on SIGUSR1."""
    faulthandler.register(_SHOW, file.open("w"), all_threads=True)


def stacks_of(pid: int, file: Path, seconds: float = 5.0) -> str:
    """Return the stacks of a process after its call of `note_stacks`; a stopped process does not answer."""
    with suppress(ProcessLookupError):
        os.kill(pid, _SHOW)
    until = time.monotonic() + seconds
    while not file.stat().st_size and time.monotonic() < until:
        time.sleep(0.05)
    return f"process {pid}:\n{file.read_text() or 'it does not answer'}"


def new_file() -> Path:
    descriptor, name = tempfile.mkstemp(dir=_folder())
    os.close(descriptor)
    return Path(name)


@cache
def _folder() -> Path:
    # No TemporaryDirectory: two threads may each make one at the first call, and the cache drops one of them, whose
    # files would disappear with it.
    folder = Path(tempfile.mkdtemp(prefix="forked-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _noted(stacks: Path, log: Path, act: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    note_stacks(stacks)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    act(*arguments)
