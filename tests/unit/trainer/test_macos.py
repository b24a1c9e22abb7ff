"""The local commands on a system with what macOS has: tests/support/macos takes the rest away in every process."""

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from pseudoreal_trainer import cgroups, portable
from pseudoreal_trainer.measure import transfers
from pseudoreal_trainer.runtime import heartbeat

from tests.support.patience import wait_for

DEADLINE = 300.0
MACOS = Path(__file__).parents[2] / "support" / "macos"


def _start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = dict(os.environ) | {"PYTHONPATH": f"{MACOS}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _output(process: subprocess.Popen[str]) -> str:
    said = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 0, said
    return said


def _pseudoreal(folder: Path, *arguments: str) -> str:
    return _output(_start(folder, "-m", "pseudoreal_trainer.cli.command", *arguments))


@pytest.fixture
def job_file(job_body: dict[str, Any], tmp_path: Path) -> Path:
    """A small job; the pseudo phase keeps state on disk, the real phase has two ranks."""
    pseudo, real = job_body["spec"]["phases"]
    pseudo["offload"] = {"homes": [{"unit": "blocks.0", "home": "Disk"}]}
    pseudo["until"], real["until"] = {"step": 3}, {"step": 5}
    job_body["metadata"] = {"name": "tiny"}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_body))
    return file


def test_a_job_is_checked_and_planned(job_file: Path) -> None:
    _pseudoreal(job_file.parent, "validate", "job.yaml")
    assert "pseudo" in _pseudoreal(job_file.parent, "plan", "job.yaml")


def test_a_job_with_state_on_disk_trains_and_ends_with_a_picture(job_file: Path) -> None:
    said = _pseudoreal(job_file.parent, "run", "job.yaml", "--workdir", "run")
    assert "phase real finished at step 5" in said
    assert (job_file.parent / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_text_becomes_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one document, of which a tokenizer of bytes makes tokens")
    said = _pseudoreal(
        tmp_path, "data", "prepare", "a.txt", "--tokenizer", "bytes", "--output", "tokens", "--workers=1"
    )
    assert "1 documents" in said


_MEASURE = """
from pathlib import Path
from pseudoreal_trainer.measure import machine, transfers
from pseudoreal_trainer.measure.passes import Cell
transfers.MOST_BYTES = transfers.DISK_BYTES = 2**22
machine.rows = lambda _: [[Cell("float32", hidden=64, tokens=64)]]
machine.measure_as_rank(0, 1, "cpu", Path.cwd(), lambda _: None)
"""


def test_a_rank_measures_the_machine(tmp_path: Path) -> None:
    _output(_start(tmp_path, "-c", _MEASURE))
    assert (tmp_path / "speeds-1.json").exists()


def test_processors_are_those_of_the_machine_without_an_affinity_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert cgroups.usable_processors(tmp_path) == 12


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("linux", 1024)])
def test_the_peak_is_in_bytes_whatever_the_system_counts(
    platform: str, unit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=70_000))
    assert portable.peak_resident_bytes() == unit * 70_000
    monkeypatch.setattr(cgroups, "_STATUS", tmp_path / "status")
    assert cgroups.memory_use().process == unit * 70_000


def test_half_of_the_memory_counts_as_free_where_nothing_says_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(transfers, "_MEMORY", tmp_path / "meminfo")
    assert transfers._available_bytes() == total // 2


@pytest.mark.parametrize(("names", "loopback"), [(["lo0", "en0"], "lo0"), (["eth0", "lo"], "lo"), (["eth0"], "lo")])
def test_the_loopback_interface_is_found(names: list[str], loopback: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names, start=1)))
    assert portable.loopback_interface() == loopback


def test_reads_without_preadv_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = np.arange(100, dtype=np.uint8)
    (tmp_path / "file").write_bytes(content.tobytes())
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)

    def read(offset: int, size: int) -> tuple[int, bytes]:
        into = bytearray(size)
        return portable.read_at(descriptor, memoryview(into), offset), bytes(into)

    ranges = [(0, 10), (95, 10), (100, 10)]
    expected = [read(*each) for each in ranges]
    assert [count for count, _ in expected] == [10, 5, 0]
    monkeypatch.delattr(os, "preadv")
    assert [read(*each) for each in ranges] == expected
    os.close(descriptor)


def test_one_read_takes_no_more_than_macos_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    assert portable._MOST_READ < 2**31
    monkeypatch.setattr(portable, "_MOST_READ", 4)
    for _ in range(2):
        into = bytearray(10)
        assert portable.read_at(descriptor, memoryview(into), 1) == 4
        assert into == b"1234" + bytes(6)
        monkeypatch.delattr(os, "preadv", raising=False)
    os.close(descriptor)


def test_ps_tells_the_state_of_a_process_where_there_is_no_proc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_PROCESSES", tmp_path / "proc")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        wait_for("a sleeping process", lambda: heartbeat.process_state(process.pid) in "SI")
        process.send_signal(signal.SIGSTOP)
        wait_for("a stopped process", lambda: heartbeat.process_state(process.pid) == "T")
        process.kill()
        wait_for("a dead process", lambda: heartbeat.process_state(process.pid) == "Z")
    assert heartbeat.process_state(process.pid) == "X"
