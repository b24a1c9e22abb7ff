"""Where a rank says it is, and that it says so when it begins to wait and when it goes on."""

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
from pseudoreal_trainer.heartbeat.stamp_file import Stamp, read_stamp
from pseudoreal_trainer.heartbeat.stamps import FileStamps
from pseudoreal_trainer.training.phase import train_phase

from tests.patience import wait_for

_WRITER = """
import itertools, pathlib, sys
from pseudoreal_trainer.heartbeat.stamp_file import StampFile
file = StampFile(pathlib.Path(sys.argv[1]), 1, 0)
for number in itertools.count():
    file.write("computing", str(number), float(number), number, number, 0.0, 0.0)
"""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "0.stamps"


@pytest.fixture
def stamps(path: Path, clock: Clock) -> FileStamps:
    return FileStamps(path, 3, clock)


def _read(path: Path) -> Stamp:
    found = read_stamp(path)
    assert found is not None
    return found


def test_a_rank_that_has_begun_is_starting(stamps: FileStamps, path: Path, clock: Clock) -> None:
    clock.now += 7
    stamps.does("imports torch")
    found = _read(path)
    assert (found.pid, found.rank, found.place, found.doing) == (os.getpid(), 3, "starting", "imports torch")
    assert (found.since, found.step, found.busy_seconds, found.save_began) == (107.0, 0, None, None)


def test_a_wait_is_said_at_its_begin_and_at_its_end(stamps: FileStamps, path: Path, clock: Clock) -> None:
    with stamps.step():
        clock.now += 2
        with stamps.wait("gathers unit 1"):
            inside = _read(path)
            clock.now += 5
        after = _read(path)
    assert (inside.place, inside.doing, inside.since, inside.waits) == ("waiting", "gathers unit 1", 102.0, 0)
    assert (after.place, after.doing, after.since, after.waits) == ("computing", "a step", 107.0, 1)


def test_a_wait_that_fails_is_left_too(stamps: FileStamps, path: Path) -> None:
    with pytest.raises(RuntimeError), stamps.wait("gathers unit 1"):
        raise RuntimeError("connection closed by peer")
    assert (_read(path).place, _read(path).waits) == ("starting", 1)


def test_busy_seconds_are_those_outside_of_waits_over_the_newest_steps(
    stamps: FileStamps, path: Path, clock: Clock
) -> None:
    stamps.stands(40)
    for step in range(12):
        with stamps.step():
            clock.now += step
            with stamps.wait("agrees"):
                clock.now += 50
        clock.now += 1000
    found = _read(path)
    assert found.step == 52
    assert found.busy_seconds == pytest.approx(sum(range(2, 12)) / 10)


def test_a_rank_that_waits_for_its_own_thread_computes_while_that_works(
    stamps: FileStamps, path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pseudoreal_trainer.heartbeat.stamps._LOOK_SECONDS", 0.001)
    future: Future[int] = Future()
    found: list[Stamp] = []

    def work() -> None:
        wait_for("updates", lambda: _read(path).doing == "updates", pause=0.001)
        found.append(_read(path))
        clock.now += 3
        with stamps.updates.wait("reduces unit 1"):
            wait_for("a reduction", lambda: _read(path).doing == "reduces unit 1", pause=0.001)
            found.append(_read(path))
            clock.now += 20
        wait_for("updates", lambda: _read(path).doing == "updates", pause=0.001)
        clock.now += 4
        future.set_result(8)

    thread = threading.Thread(target=work)
    with stamps.step():
        clock.now += 1
        thread.start()
        assert stamps.result(future, stamps.updates) == 8
    thread.join()
    assert [(stamp.place, stamp.since) for stamp in found] == [("computing", 101.0), ("waiting", 104.0)]
    assert _read(path).busy_seconds == 1 + 3 + 4
    assert _read(path).waits == 1


def test_a_wait_that_is_over_already_is_counted_all_the_same(stamps: FileStamps, path: Path) -> None:
    """Ranks with the same plan leave the same waits, however fast their threads are."""
    done: Future[None] = Future()
    done.set_result(None)
    stamps.result(done, stamps.updates)
    stamps.does("compute")
    assert _read(path).waits == 1


def test_what_the_main_thread_waits_for_others_of_its_rank_is_counted(stamps: FileStamps, clock: Clock) -> None:
    def ready(seconds: float) -> bool:
        clock.now += 2 if seconds else 0
        return seconds > 0

    stamps.until(ready, stamps.reductions)
    stamps.until(ready, stamps.updates)
    stamps.until(ready, stamps.saving)
    stamps.until(lambda _: True, stamps.updates)
    assert (stamps.reductions.stalled, stamps.updates.stalled, stamps.stalled) == (2, 2, 4)


def test_a_save_lasts_until_the_thread_that_saves_says_so(stamps: FileStamps, path: Path, clock: Clock) -> None:
    stamps.save_begins()
    assert _read(path).save_began == 100.0
    clock.now += 5
    stamps.save_ends()
    assert _read(path).save_began is None
    clock.now += 5
    stamps.save_begins()
    assert _read(path).save_began == 110.0


def test_a_record_that_is_cut_off_gives_way_to_the_one_before(stamps: FileStamps, path: Path) -> None:
    stamps.does("first")
    stamps.does("second")
    whole = path.read_bytes()
    assert _read(path).doing == "second"
    for place in (128 * slot + offset for slot in range(2) for offset in (0, 8, 20, 90, 110)):
        torn = bytearray(whole)
        torn[place] ^= 1
        path.write_bytes(torn)
        assert _read(path).doing in ("first", "second")
    path.write_bytes(bytes(len(whole)))
    assert read_stamp(path) is None
    path.write_bytes(b"")
    assert read_stamp(path) is None


def test_who_reads_while_it_is_written_never_reads_two_records_as_one(path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)])
    try:
        wait_for("a record", lambda: path.exists() and read_stamp(path) is not None)
        read: list[Stamp | None] = []

        def enough() -> bool:
            read.extend(read_stamp(path) for _ in range(20_000))
            return len({stamp.step for stamp in read if stamp}) > 100

        # More than once where the writer had no processor meanwhile.
        wait_for("a hundred records", enough, pause=0.001)
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()
    found = [stamp for stamp in read if stamp is not None]
    assert all(stamp.doing == str(stamp.step) and stamp.since == stamp.step == stamp.waits for stamp in found)
    assert len(found) > 0.995 * len(read), "it is between two words for a moment only"


def test_a_rank_whose_import_hangs_is_starting(config: Any, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("while True: pass")
    (tmp_path / "config.json").write_text(config(0).to_json())
    search = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = dict(os.environ) | {"PYTHONPATH": search, "PSEUDOREAL_OUTCOME_DIRECTORY": str(tmp_path), "RANK": "5"}
    command = [sys.executable, "-m", "pseudoreal_trainer.cli.rank", str(tmp_path / "config.json")]
    worker, stamps = subprocess.Popen(command, env=environment), tmp_path / "0.stamps"
    try:
        wait_for(
            "the import of torch",
            lambda: stamps.exists() and read_stamp(stamps) is not None and _read(stamps).doing == "imports torch",
            pause=0.001,
        )
        found = _read(stamps)
        assert (found.place, found.rank, found.pid) == ("starting", 5, worker.pid)
    finally:
        worker.kill()
        worker.wait()


def test_a_phase_says_its_steps_and_that_it_does_not_wait_any_more(config: Any, path: Path) -> None:
    stamps = FileStamps(path, 0)
    ranks = Ranks(0, 1, torch.device("cpu"), stamps)
    phase = config(0)
    seen: list[Stamp] = []

    def look() -> bool:
        seen.append(_read(path))
        return False

    train_phase(phase, load_corpus(phase.data, phase.model.sequence), ranks, look)
    assert [stamp.step for stamp in seen] == list(range(6))
    assert {stamp.place for stamp in seen} == {"computing"}
    last = _read(path)
    assert (last.step, last.place, last.save_began) == (6, "computing", None)
    assert last.waits > seen[-1].waits > 0
    assert last.busy_seconds is not None
    assert last.busy_seconds > 0
    stamps.ends()
    assert _read(path).place == "ended"
