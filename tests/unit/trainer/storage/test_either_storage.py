"""Writes to checkpoints that an execution must not make, on a file system and in object storage."""

import threading
from typing import Any

import numpy as np
import pytest
from pseudoreal_trainer.checkpoint.fence import Fence
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.checkpoint.tensor_file import TensorWriter
from pseudoreal_trainer.errors import TrainingError

from tests.support.checkpoints import newest


@pytest.mark.parametrize(
    ("successor", "said"), [((2, 0), "was replaced by execution 2"), ((1, 1), "a spare pod took a place")]
)
def test_execution_that_is_replaced_while_it_writes_does_not_commit(
    successor: tuple[int, int],
    said: str,
    store: CheckpointStore,
    config: Any,
    train: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    append, taken = TensorWriter.append, threading.Event()

    def replaced_meanwhile(self: TensorWriter, content: Any) -> None:
        append(self, content)
        if not taken.is_set() and "00000004" in str(self.path):
            taken.set()
            Fence(store.work_directory, *successor).claim()

    monkeypatch.setattr(TensorWriter, "append", replaced_meanwhile)
    for _ in range(2):
        with pytest.raises(TrainingError, match=said):
            train(config(0))
        assert [manifest.step for manifest in store.committed()] == [2]


def test_a_start_that_made_no_step_is_restated_not_rewritten(
    store: CheckpointStore, config: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later execution finds that a phase has finished without being marked complete. The checkpoint's files stay
    where they are."""
    train(config(0))
    ended = store.whole(store.committed("pseudo")[-1])
    store.restate(ended.model_copy(update={"phase_complete": False}))
    before = newest(store, "pseudo").whole("second_moment")

    def refuse(*_: Any) -> None:
        raise AssertionError("nothing is written but the manifest")

    with monkeypatch.context() as patch:
        patch.setattr(TensorWriter, "__init__", refuse)
        assert train(config(0, execution=2)).outcome == "Succeeded"
    after = newest(store, "pseudo")
    assert after.manifest == ended.model_copy(update={"execution": 2})
    assert all(np.array_equal(array, before[name]) for name, array in after.whole("second_moment").items())
