"""Heartbeat of a rank: start and end of every wait, and every step, are recorded."""

import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_trainer.data.corpus import load_corpus
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.runtime.heartbeat import Heartbeat, HeartbeatFile, HeartbeatRecord, SideThread, read_heartbeat
from pseudoreal_trainer.training.phase import train_phase

from tests.support.patience import wait_for


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "0.heartbeat"


@pytest.fixture
def heartbeat(path: Path, clock: Clock) -> Heartbeat:
    return Heartbeat(HeartbeatFile(path, os.getpid(), 3), clock)


def _read(path: Path) -> HeartbeatRecord:
    found = read_heartbeat(path)
    assert found is not None
    return found


def test_the_activity_of_a_rank_before_its_first_step_is_starting(
    heartbeat: Heartbeat, path: Path, clock: Clock
) -> None:
    clock.now += 7
    heartbeat.working("imports torch")
    found = _read(path)
    assert (found.pid, found.rank, found.activity, found.doing) == (os.getpid(), 3, "starting", "imports torch")
    assert (found.since, found.step, found.busy_seconds, found.save_began) == (107.0, 0, None, None)


def test_a_wait_is_recorded_at_its_start_and_at_its_end(heartbeat: Heartbeat, path: Path, clock: Clock) -> None:
    with heartbeat.step():
        clock.now += 2
        with heartbeat.waiting("gathers unit 1"):
            inside = _read(path)
            clock.now += 5
        after = _read(path)
    assert (inside.activity, inside.doing, inside.since) == ("waiting", "gathers unit 1", 102.0)
    assert (after.activity, after.doing, after.since) == ("computing", "a step", 107.0)


def test_a_failed_wait_is_recorded_as_ended(heartbeat: Heartbeat, path: Path) -> None:
    with pytest.raises(RuntimeError), heartbeat.waiting("gathers unit 1"):
        raise RuntimeError("connection closed by peer")
    assert _read(path).activity == "starting"


def test_busy_seconds_are_the_mean_time_of_the_newest_steps_without_waits(
    heartbeat: Heartbeat, path: Path, clock: Clock
) -> None:
    heartbeat.step_done(40)
    for step in range(12):
        with heartbeat.step():
            clock.now += step
            with heartbeat.waiting("agrees"):
                clock.now += 50
        clock.now += 1000
    found = _read(path)
    assert found.step == 52
    assert found.busy_seconds == pytest.approx(sum(range(2, 12)) / 10)


def test_a_rank_that_waits_for_its_own_thread_computes_while_that_works(
    heartbeat: Heartbeat, path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pseudoreal_trainer.runtime.heartbeat._LOOK_SECONDS", 0.001)
    future: Future[int] = Future()
    found: list[HeartbeatRecord] = []

    def work() -> None:
        wait_for("updates", lambda: _read(path).doing == "updates", pause=0.001)
        found.append(_read(path))
        clock.now += 3
        with heartbeat.updates.waiting("reduces unit 1"):
            wait_for("a reduction", lambda: _read(path).doing == "reduces unit 1", pause=0.001)
            found.append(_read(path))
            clock.now += 20
        wait_for("updates", lambda: _read(path).doing == "updates", pause=0.001)
        clock.now += 4
        future.set_result(8)

    thread = threading.Thread(target=work)
    with heartbeat.step():
        clock.now += 1
        thread.start()
        assert heartbeat.join(future, heartbeat.updates) == 8
    thread.join()
    assert [(record.activity, record.since) for record in found] == [("computing", 101.0), ("waiting", 104.0)]
    assert _read(path).busy_seconds == 1 + 3 + 4


def test_time_that_the_main_thread_waits_for_other_threads_is_counted(
    heartbeat: Heartbeat, path: Path, clock: Clock
) -> None:
    for thread in (heartbeat.reductions, heartbeat.updates, heartbeat.saving):
        future: Future[None] = Future()

        def work(thread: SideThread = thread, future: Future[None] = future) -> None:
            wait_for(thread.work, lambda: _read(path).doing == thread.work, pause=0.001)
            clock.now += 2
            future.set_result(None)

        worker = threading.Thread(target=work)
        worker.start()
        heartbeat.join(future, thread)
        heartbeat.join(future, thread)
        worker.join()
    seconds = [thread.stalled_seconds for thread in (heartbeat.reductions, heartbeat.updates, heartbeat.saving)]
    assert (seconds, heartbeat.stalled_seconds) == ([2, 2, 2], 4)


def test_joining_a_thread_raises_the_first_failure_of_any_thread(
    heartbeat: Heartbeat, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pseudoreal_trainer.runtime.heartbeat._LOOK_SECONDS", 0.001)
    never: Future[None] = Future()

    def fail() -> None:
        wait_for("the join", lambda: _read(path).doing == "updates", pause=0.001)
        heartbeat.failure.add(OSError("the disk has failed"))

    thread = threading.Thread(target=fail)
    thread.start()
    with pytest.raises(OSError, match="the disk has failed"):
        heartbeat.join(never, heartbeat.updates)
    thread.join()
    assert _read(path).activity == "starting"


def test_a_save_lasts_until_the_thread_that_saves_says_so(heartbeat: Heartbeat, path: Path, clock: Clock) -> None:
    heartbeat.save_begun()
    assert _read(path).save_began == 100.0
    clock.now += 5
    heartbeat.save_done()
    assert _read(path).save_began is None
    clock.now += 5
    heartbeat.save_begun()
    assert _read(path).save_began == 110.0


def test_a_rank_whose_import_hangs_is_starting(config: Any, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("while True: pass")
    (tmp_path / "config.json").write_text(config(0).to_json())
    search = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = dict(os.environ) | {"PYTHONPATH": search, "PSEUDOREAL_OUTCOME_DIRECTORY": str(tmp_path), "RANK": "5"}
    command = [sys.executable, "-m", "pseudoreal_trainer.cli.rank", str(tmp_path / "config.json")]
    worker, file = subprocess.Popen(command, env=environment), tmp_path / "0.heartbeat"
    try:
        wait_for(
            "the import of torch",
            lambda: file.exists() and read_heartbeat(file) is not None and _read(file).doing == "imports torch",
            pause=0.001,
        )
        found = _read(file)
        assert (found.activity, found.rank, found.pid) == ("starting", 5, worker.pid)
    finally:
        worker.kill()
        worker.wait()


def test_the_heartbeat_of_a_finished_phase_has_its_last_step_and_no_wait(config: Any, path: Path) -> None:
    heartbeat = Heartbeat(HeartbeatFile(path, os.getpid(), 0))
    ranks = Ranks(0, 1, torch.device("cpu"), heartbeat)
    phase = config(0)
    seen: list[HeartbeatRecord] = []

    def look() -> bool:
        seen.append(_read(path))
        return False

    train_phase(phase, load_corpus(phase.data, phase.model.sequence_length), ranks, look)
    assert [record.step for record in seen] == list(range(6))
    assert {record.activity for record in seen} == {"computing"}
    last = _read(path)
    assert (last.step, last.activity, last.save_began) == (6, "computing", None)
    assert last.busy_seconds is not None
    assert last.busy_seconds > 0
    heartbeat.ended()
    assert _read(path).activity == "ended"
