"""A deadlock of ranks ends the test that has it, by name, instead of the patience of whoever waits."""

import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes

from tests.support.forked import _join, join_in_time
from tests.support.patience import wait_for
from tests.support.processes import Forked, _folder, new_file


def _one_waits(rank: int) -> None:
    dist.barrier()
    while rank == 1:
        signal.pause()


def test_ranks_that_do_not_end_are_named_and_killed() -> None:
    stacks = [new_file() for _ in range(2)]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (2, store.port, "gloo", stacks, _one_waits, ())
    ranks = start_processes(_join, arguments, nprocs=2, join=False, start_method="forkserver")
    ranks.processes[0].join()
    with pytest.raises(TimeoutError, match=r"(?s)after 0 s ranks \[1\] have not ended\nrank 1, .* in _one_waits"):
        join_in_time(ranks, stacks, 0.0)
    ranks.processes[1].join()
    assert ranks.processes[1].exitcode == -signal.SIGKILL


def _wait(begun: Path) -> None:
    begun.touch()
    while True:
        signal.pause()


def test_a_process_that_does_not_end_says_where_it_is_and_is_killed(tmp_path: Path) -> None:
    process = Forked(_wait, tmp_path / "begun")
    wait_for("its begin", (tmp_path / "begun").exists)
    with pytest.raises(TimeoutError, match=r"(?s)after 0 s 1 of 1 processes have not ended\nprocess .* in _wait"):
        process.wait(0.0)
    assert process.poll() == -signal.SIGKILL


def test_files_of_threads_that_ask_at_the_same_time_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    make, both = tempfile.mkdtemp, Barrier(2)

    def make_when_both_ask(*arguments: Any, **named: Any) -> str:
        both.wait(20)
        return str(make(*arguments, **named))

    monkeypatch.setattr(tempfile, "mkdtemp", make_when_both_ask)
    _folder.cache_clear()
    with ThreadPoolExecutor(2) as pool:
        files = [*pool.map(lambda _: new_file(), range(2))]
    assert all(file.exists() for file in files)
