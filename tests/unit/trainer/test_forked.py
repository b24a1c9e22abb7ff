"""A deadlock of ranks ends the test that has it, by name, instead of the patience of whoever waits."""

import signal

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from tests.ports import free_port
from tests.unit.trainer.forked import _join, join_in_time


def _one_waits(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        signal.pause()


def test_ranks_that_do_not_end_are_named_and_killed() -> None:
    arguments = (2, free_port(), "gloo", _one_waits, ())
    ranks = start_processes(_join, arguments, nprocs=2, join=False, start_method="forkserver")
    ranks.processes[0].join()
    with pytest.raises(TimeoutError, match=r"after 0 s ranks \[1\] have not ended"):
        join_in_time(ranks, 0.0)
    ranks.processes[1].join()
    assert ranks.processes[1].exitcode == -signal.SIGKILL
