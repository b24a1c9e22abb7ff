import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from pseudoreal_dev.machine import processes
from pseudoreal_dev.machine.processes import Process

from tests.support.patience import wait_for


@pytest.fixture
def sleeper(tmp_path: Path) -> Process:
    found = processes.launch("sleeper", ["sleep", "1000"], records=tmp_path / "records", log=tmp_path / "log")
    # Right after exec, the command line of a process is empty for a moment.
    wait_for("its command line", lambda: processes.words_of(found.pid))
    return found


def test_a_process_is_recorded_in_its_own_session_and_stopped(sleeper: Process, tmp_path: Path) -> None:
    records = tmp_path / "records"
    assert processes.recorded(records) == [sleeper]
    assert processes.is_running(sleeper)
    assert os.getsid(sleeper.pid) == sleeper.pid  # so Ctrl-C in this terminal does not reach it
    processes.stop([sleeper], records)
    assert not processes.is_running(sleeper)
    assert processes.recorded(records) == []


def test_a_later_owner_of_the_id_is_left_alone(sleeper: Process, tmp_path: Path) -> None:
    records = tmp_path / "records"
    for stranger in (replace(sleeper, started=sleeper.started + 1), replace(sleeper, argument="another")):
        assert not processes.is_running(stranger)
        processes.stop([stranger], records)
        assert processes.is_running(sleeper)
    processes.end([sleeper], records)


def test_a_killed_process_leaves_no_zombie(sleeper: Process, tmp_path: Path) -> None:
    """Only then the kernel counts its processor time as time of this program's children, as benchmarks do."""
    processes.end([sleeper], tmp_path / "records")
    assert not Path("/proc", str(sleeper.pid)).exists()


def test_one_that_was_killed_from_outside_is_seen_as_ended(sleeper: Process, tmp_path: Path) -> None:
    os.kill(sleeper.pid, signal.SIGKILL)
    os.waitpid(sleeper.pid, 0)
    assert not processes.is_running(sleeper)
    processes.stop([sleeper], tmp_path / "records")
    assert processes.recorded(tmp_path / "records") == []


def test_ctrl_c_waits_for_the_end_of_the_block() -> None:
    done = []

    def block() -> None:
        with processes.interrupt_deferred():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done
