"""A crashed rank is distinguished from a killed one, and an abort by NCCL's watchdog from other crashes."""

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_trainer.runtime.failures import Crash, enable_crash_files, read_crashes
from pseudoreal_trainer.runtime.termination import pod_outcome

from tests.support.processes import Forked, preload

preload("tests.support.warm")

WATCHDOG = Crash("Aborted", None)


def abort_in_python() -> None:
    os.abort()


def abort_beside_python() -> None:
    """Abort as NCCL's watchdog does: from a thread that was not created by Python."""
    library, thread = ctypes.CDLL(None), ctypes.c_ulong()
    library.pthread_create(ctypes.byref(thread), None, library.abort, None)
    threading.Event().wait()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _rank(folder: Path, end: Callable[[], None]) -> None:
    enable_crash_files(folder, 1)
    end()


def _ended_by(end: Callable[[], None], folder: Path) -> tuple[int, Crash | None]:
    return Forked(_rank, folder, end).wait(), read_crashes(folder, 2).get(1)


def test_an_abort_of_a_thread_without_python_is_the_watchdog_s(tmp_path: Path) -> None:
    code, crash = _ended_by(abort_beside_python, tmp_path)
    # faulthandler reads the frames of the main thread while that thread runs, and may fault there itself.
    assert code in (-signal.SIGABRT, -signal.SIGSEGV)
    assert crash == WATCHDOG
    assert crash is not None
    assert crash.is_of_watchdog


def test_an_abort_of_python_names_its_line(tmp_path: Path) -> None:
    code, crash = _ended_by(abort_in_python, tmp_path)
    assert code == -signal.SIGABRT
    assert crash is not None
    assert not crash.is_of_watchdog
    assert "in abort_in_python" in str(crash.where)


def test_a_killed_rank_leaves_no_crash_file(tmp_path: Path) -> None:
    assert _ended_by(kill, tmp_path) == (-signal.SIGKILL, None)


@pytest.fixture
def pair(config: Any) -> Any:
    return config(0).model_copy(update={"processes_per_worker": 2, "collective_seconds": 3000})


def test_a_collective_that_timed_out_is_no_lack_of_memory(pair: Any) -> None:
    found = pod_outcome([], pair, 1, False, ended={0}, crashes={1: WATCHDOG})
    assert found.message == (
        "local rank 1: a collective timed out after 3000 s (NCCL watchdog), as some rank did not take part in it"
    )
    assert (found.outcome, found.peer_lost) == ("Failed", True)


def test_a_kill_is_the_cause_of_the_collectives_that_time_out_after_it(pair: Any) -> None:
    found = pod_outcome([], pair, 1, False, crashes={1: WATCHDOG})
    assert found.message.startswith("local rank 0 ended without a message, as a killed process does")
    assert "local rank 1: a collective timed out" in found.message
    assert not found.peer_lost


def test_a_crash_outside_of_the_watchdog_is_the_fault_of_its_rank(pair: Any) -> None:
    crash = Crash("Segmentation fault", 'File "x.py", line 3 in go')
    found = pod_outcome([], pair, 1, False, ended={0}, crashes={1: crash})
    assert found.message == 'local rank 1 crashed (Segmentation fault) in File "x.py", line 3 in go'
    assert not found.peer_lost
