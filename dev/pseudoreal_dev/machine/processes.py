"""Long-running processes: detached from the terminal, and recorded in files. A recorded process is killed only if its
id still belongs to that process."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from pseudoreal_dev.machine.shell import open_log

STOP_SECONDS = 10.0
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Process:
    """A process as of its start.

    `started` (clock ticks after boot) and `argument` (last word of the command) distinguish the process from a later
    process with the same id.
    """

    name: str
    pid: int
    started: int
    argument: str
    log: str


def launch(name: str, command: Sequence[str | Path], *, records: Path, log: Path) -> Process:
    """Start `command` in a new session, out of reach of Ctrl-C. Record the process as `records`/`name`.json."""
    records.mkdir(parents=True, exist_ok=True)
    with interrupt_deferred(), open_log(log) as out:
        child = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        process = Process(name, child.pid, start_ticks(child.pid) or 0, str(command[-1]), str(log))
        (records / f"{name}.json").write_text(json.dumps(asdict(process)))
    # Mark the child as ended for Popen: otherwise Popen would warn that the child still runs. The child outlives this
    # program.
    child.returncode = 0
    return process


def recorded(records: Path) -> list[Process]:
    """Return the processes recorded in a folder, running or not."""
    return [Process(**json.loads(path.read_text())) for path in sorted(records.glob("*.json"))]


def is_running(process: Process) -> bool:
    """Return whether the recorded process itself runs: same id, same start, same last word, and not a zombie."""
    _reap(process.pid)
    words = words_of(process.pid)
    # While one program replaces another by exec (nsenter by the launched program), the command line is empty for a
    # moment.
    return start_ticks(process.pid) == process.started and (not words or process.argument in words)


def stop(processes: Sequence[Process], records: Path) -> None:
    """Terminate the processes together, kill any survivors after the time limit, and remove their records."""
    running = [process for process in processes if is_running(process)]
    for process in running:
        _signal(process.pid, signal.SIGTERM)
    _wait(lambda: not any(map(is_running, running)))
    end(processes, records)


def end(processes: Sequence[Process], records: Path) -> None:
    """Kill the processes, and remove their records."""
    kill([process.pid for process in processes if is_running(process)])
    for process in processes:
        (records / f"{process.name}.json").unlink(missing_ok=True)


def start_ticks(pid: int) -> int | None:
    """Return the start of a process in clock ticks after boot; None if the process does not exist or is a zombie."""
    try:
        # The second field, the program's name, can contain spaces and brackets: parse after its closing bracket.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def command_lines() -> Iterator[tuple[int, list[str]]]:
    """Yield the id and the command line of every process on the machine."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name), words_of(int(entry.name))


def words_of(pid: int) -> list[str]:
    """Return a process's command line; empty if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return []


def kill(pids: Sequence[int]) -> None:
    """Kill processes, wait until they are gone, and leave no zombies of this program's children, so that their
    processor time counts as time of children."""
    for pid in pids:
        _signal(pid, signal.SIGKILL)
    _wait(lambda: not any(start_ticks(pid) or _reap(pid) for pid in pids))


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Defer Ctrl-C until the end of the context, so that no started process is left without a record."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        interrupts.append(number)

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


def _wait(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + STOP_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap(pid: int) -> bool:
    """Reap the process if it is an ended child of this program; return whether it is a child that has not ended."""
    with suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    return False
