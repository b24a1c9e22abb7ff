"""A rank whose peer is stopped ends by itself after the limit and reports that a collective timed out."""

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.messages import TerminationMessage
from pseudoreal_trainer.cli import rank as program
from pseudoreal_trainer.engine.ranks.process_groups import create_process_groups
from pseudoreal_trainer.engine.ranks.ranks import open_ranks
from pseudoreal_trainer.plan.memory.from_config import phase_layout
from pseudoreal_trainer.runtime.failures import timeout_sentence
from pseudoreal_trainer.runtime.termination import read_outcome

from tests.support.ports import free_port
from tests.support.processes import Forked, preload, succeed

preload("tests.support.warm")

LIMIT = 10
"""Limit of a collective in seconds: both ranks start within it, and the test takes at least as long."""


def _rank(number: int, port: int, config: PhaseConfig, folder: Path) -> None:
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update(address, RANK=str(number), WORLD_SIZE="2", PSEUDOREAL_OUTCOME_DIRECTORY=str(folder / str(number)))

    def train(*_: Any) -> TerminationMessage:
        assert config.collective_seconds is not None
        with open_ranks(limit=timedelta(seconds=config.collective_seconds)) as ranks:
            groups = create_process_groups(phase_layout(config, "cpu"), ranks)
            dist.all_reduce(torch.ones(1), group=groups.unit_groups(1).intra)
            if number == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            dist.all_reduce(torch.ones(1), group=groups.unit_groups(1).intra)
        raise AssertionError("the other rank stands still")

    program._train = train  # type: ignore[assignment]
    file = folder / f"{number}.json"
    file.write_text(config.to_json())
    program.run_rank(file, lambda _: None)
    os._exit(0)


def test_a_rank_names_the_time_limit_when_its_peer_hangs(config: Any, tmp_path: Path) -> None:
    own = config(1).model_copy(update={"collective_seconds": LIMIT})
    port = free_port()
    for number in (0, 1):
        (tmp_path / str(number)).mkdir()
    ranks = [Forked(_rank, number, port, own, tmp_path) for number in (0, 1)]
    try:
        succeed(ranks[:1])
    finally:
        for rank in ranks:
            rank.kill()
    outcome = read_outcome(tmp_path / "0", 0)
    assert outcome is not None
    message = outcome.message
    assert message.outcome == "Failed"
    assert message.peer_lost
    assert message.message.startswith(f"a collective timed out after {LIMIT} s, as some rank did not take part in it: ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "Watchdog caught collective operation timeout: WorkNCCL ran for 600000 milliseconds",
            " after 600 s",
        ),
        (
            "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation",
            " after 1800 s",
        ),
        ("[/a/gloo/transport/tcp/pair.cc:561] Connection closed by peer", None),
        ("the disk timed out after 30 ms", None),
    ],
)
def test_the_time_limit_is_read_from_the_error_of_the_network(text: str, says: str | None) -> None:
    sentence = timeout_sentence(RuntimeError(text))
    assert sentence == ("" if says is None else f"a collective timed out{says}, as some rank did not take part in it: ")
