"""Checkpoints and metrics in the work directory of a phase."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.plan.units import KINDS


def newest(store: CheckpointStore, phase: str, *, complete: bool = False) -> Reader:
    """Return the newest verified checkpoint of a phase; with `complete`, the checkpoint at the end of the phase."""
    found = store.newest(phase, complete=complete)
    assert found is not None, f"phase {phase} has a checkpoint"
    return found


def newest_of(config: PhaseConfig) -> Reader:
    return newest(CheckpointStore(Path(config.work_directory), config.job.uid), config.phase)


def assert_same(one: Reader, other: Reader) -> None:
    """Assert equality of two checkpoints' states to the bit, after the same steps."""
    assert (one.manifest.name, one.manifest.updates) == (other.manifest.name, other.manifest.updates)
    for kind in KINDS:
        expected, found = one.whole(kind), other.whole(kind)
        assert expected.keys() == found.keys()
        for name, array in expected.items():
            assert (array.dtype, array.shape) == (found[name].dtype, found[name].shape), (name, kind)
            assert np.array_equal(array, found[name]), (name, kind)


def metrics(config: PhaseConfig) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (Path(config.work_directory) / "metrics.jsonl").read_text().splitlines()]
