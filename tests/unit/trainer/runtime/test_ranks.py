"""A restart in place requires that all earlier ranks are dead: a live rank could still commit a checkpoint."""

import subprocess
from math import nan
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_trainer.runtime import ranks
from pseudoreal_trainer.runtime.heartbeat import HeartbeatFile
from pseudoreal_trainer.runtime.pod_folder import PodFolder
from pseudoreal_trainer.runtime.ranks import Launch, run_ranks
from pseudoreal_trainer.runtime.rendezvous.identity import RendezvousIdentity
from pseudoreal_trainer.runtime.stop import Stop

FIRST, AGAIN = (RendezvousIdentity(restart, 0, 0, 1) for restart in (0, 1))


@pytest.fixture
def launch(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Return a pod's launch in which torchrun ends at once and the ranks leave no outcome."""
    # The real constructor would install signal handlers in the test process.
    monkeypatch.setattr(Stop, "__init__", lambda stop: setattr(stop, "asked", False))
    monkeypatch.setattr(ranks, "_run_torchrun", lambda *_: 1)
    return Launch(config(0), tmp_path / "config", "worker", PodFolder(tmp_path), Stop())


def test_a_rank_that_outlives_torchrun_forbids_a_restart(launch: Launch) -> None:
    rank = subprocess.Popen(["sleep", "1000"])
    try:
        HeartbeatFile(launch.folder.heartbeat(0), rank.pid, 0).write("computing", "a step", 0.0, 1, nan, nan)
        ended = run_ranks(launch, FIRST)
        assert ended is not None
        assert not ended.may_restart
    finally:
        rank.kill()
        rank.wait()
    ended = run_ranks(launch, AGAIN)
    assert ended is not None
    assert ended.may_restart


def test_a_restart_without_a_started_rank_returns_no_result(launch: Launch) -> None:
    assert run_ranks(launch, AGAIN) is None
    first = run_ranks(launch, FIRST)
    assert first is not None, "the first start always returns an ending"
