"""A reader of the heartbeat file always finds a whole record, even while the rank writes."""

import subprocess
import sys
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest
from pseudoreal_trainer.runtime.heartbeat import HeartbeatFile, HeartbeatRecord, read_heartbeat

from tests.support.patience import wait_for

_WRITER = """
import itertools, pathlib, sys
from pseudoreal_trainer.runtime.heartbeat import HeartbeatFile
file = HeartbeatFile(pathlib.Path(sys.argv[1]), 1, 0)
for number in itertools.count():
    file.write("computing", str(number), float(number), number, 0.0, 0.0)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "0.heartbeat"


def _doing(path: Path) -> str:
    found = read_heartbeat(path)
    assert found is not None
    return found.doing


def test_a_heartbeat_record_is_read_as_it_was_written(path: Path) -> None:
    file = HeartbeatFile(path, 7, 3)
    file.write("waiting", "reduces unit 1", 102.5, 41, 0.25, 100.0)
    written = HeartbeatRecord(7, 3, "waiting", "reduces unit 1", 102.5, 41, busy_seconds=0.25, save_began=100.0)
    assert read_heartbeat(path) == written
    file.write_saved(108.0)
    assert read_heartbeat(path) == replace(written, save_began=None)


def test_a_truncated_record_is_ignored_in_favour_of_the_previous_one(path: Path) -> None:
    file = HeartbeatFile(path, 1, 0)
    for doing in ("first", "second"):
        file.write("computing", doing, 0.0, 0, nan, nan)
    whole = path.read_bytes()
    assert _doing(path) == "second"
    for position in (128 * copy + offset for copy in range(2) for offset in (0, 8, 20, 90, 110)):
        torn = bytearray(whole)
        torn[position] ^= 1
        path.write_bytes(torn)
        assert _doing(path) in ("first", "second")
    path.write_bytes(bytes(len(whole)))
    assert read_heartbeat(path) is None
    path.write_bytes(b"")
    assert read_heartbeat(path) is None


def test_a_reader_during_a_write_never_mixes_two_records(path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)])
    try:
        wait_for("a record", lambda: path.exists() and read_heartbeat(path) is not None)
        read: list[HeartbeatRecord | None] = []

        def enough() -> bool:
            read.extend(read_heartbeat(path) for _ in range(20_000))
            return len({record.step for record in read if record}) > 100

        # The loop repeats if the writer got too little processor time.
        wait_for("a hundred records", enough, pause=0.001)
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()
    found = [record for record in read if record is not None]
    assert all(record.doing == str(record.step) and record.since == record.step for record in found)
    assert len(found) > 0.995 * len(read), "the file is between two records only for a moment"
