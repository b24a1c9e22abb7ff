"""The history of a job: which pods record what, and that no storage can stop them."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.wire.messages import InPlace
from pseudoreal_api.wire.reports import NODE_NAME
from pseudoreal_trainer.runtime import history
from pseudoreal_trainer.runtime.history import (
    HISTORY,
    HistoryEntry,
    record_end,
    record_restart_in_place,
    record_start,
)
from pseudoreal_trainer.runtime.termination import termination_message
from pseudoreal_trainer.storage.files import FileStorage


def _entries(config: Any) -> list[HistoryEntry]:
    found = sorted((Path(config.work_directory) / HISTORY).glob("*.json"))
    return [HistoryEntry.model_validate_json(path.read_bytes()) for path in found]


def _await_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "history":
            thread.join(60)


def test_start_names_checkpoint_node_and_configuration(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE_NAME, "gpu-7")
    monkeypatch.setattr("socket.gethostname", lambda: "tiny-real-e3-0")
    record_start(config(1, execution=3), 40, "real-00000040", restart=2)
    (entry,) = _entries(config(1))
    assert (entry.event, entry.phase, entry.execution, entry.restart) == ("Started", "real", 3, 2)
    assert (entry.pod, entry.node, entry.step, entry.checkpoint) == ("tiny-real-e3-0", "gpu-7", 40, "real-00000040")
    assert entry.config == config(1, execution=3).to_dict()


@pytest.mark.parametrize(
    ("outcome", "peer_lost", "index", "is_recorded"),
    [
        ("Failed", False, "5", True),
        ("OutOfMemory", False, "5", True),
        ("Failed", True, "5", False),
        ("Failed", True, "0", True),
        ("Succeeded", False, "5", False),
        ("Yielded", False, "5", False),
        ("Succeeded", False, "0", True),
    ],
)
def test_an_end_is_recorded_by_worker_0_and_by_pods_at_fault(
    outcome: Any, peer_lost: bool, index: str, is_recorded: bool, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 pods that lose one peer must not write 512 files."""
    monkeypatch.setenv("PET_NODE_RANK", index)
    record_end(config(0), termination_message(outcome, config(0), "why", 3, peer_lost=peer_lost), [10, 11])
    expected = [("Ended", outcome, "why", 3, [10, 11])] if is_recorded else []
    assert [(e.event, e.outcome, e.message, e.suspect, e.ranks) for e in _entries(config(0))] == expected


@pytest.mark.parametrize("peer_lost", [False, True])
def test_a_restart_in_place_is_recorded_by_the_pod_at_fault(peer_lost: bool, config: Any) -> None:
    record_restart_in_place(config(0), InPlace(restarts=2, peer_lost=peer_lost, message="rank 1 died"), [0, 1])
    _await_threads()
    found = [(e.event, e.restart, e.message) for e in _entries(config(0))]
    assert found == ([] if peer_lost else [("RestartedInPlace", 2, "rank 1 died")])


def test_storage_that_refuses_or_hangs_ends_nothing(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").write_text("a file where the folder should be")
    record_start(config(0), 0, None, restart=0)

    released = threading.Event()
    monkeypatch.setattr(history, "_WRITE_SECONDS", 0.1)
    monkeypatch.setattr(FileStorage, "make_folder", lambda _: released.wait(60))
    before = time.monotonic()
    record_start(config(0), 0, None, restart=0)
    record_end(config(0), termination_message("Failed", config(0), "why"))
    assert time.monotonic() - before < 30
    released.set()
    _await_threads()
