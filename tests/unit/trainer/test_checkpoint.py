from pathlib import Path

import numpy as np
import pytest
from pseudoreal_api.model_spec import Model
from pseudoreal_api.phase_spec import Sharing
from pseudoreal_api.resolved import JobIdentity
from pseudoreal_trainer.checkpoint import Checkpoint, CheckpointStore, CorruptCheckpoint
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.fence import Fence
from pseudoreal_trainer.manifest import Manifest


def _checkpoint(step: int, phase: str = "pseudo", *, complete: bool = False, delinked: bool = False) -> Checkpoint:
    manifest = Manifest(
        job=JobIdentity(name="tiny", namespace="default", uid="u1"),
        attempt=1,
        phase=phase,
        phase_index=("pseudo", "real").index(phase),
        model=Model.model_validate({"layers": 2, "hidden": 4, "heads": 1, "sequence": 4, "ffn": {"hidden": 4}}),
        sharing=Sharing(blocks=1),
        step=step,
        tokens=step * 8,
        global_cursor=step * 2,
        phase_complete=complete,
        delinked=delinked,
    )
    return Checkpoint(manifest, {"weight": np.full((2, 3), step, np.float32)}, {"weight.step": np.array(float(step))})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, "u1")


def _newest_step(store: CheckpointStore, phase: str = "pseudo") -> int | None:
    found = store.load_newest(phase)
    if found is None:
        return None
    assert found.model["weight"][0, 0] == found.manifest.step, "weights and manifest belong together"
    return found.manifest.step


def test_what_was_saved_is_loaded(store: CheckpointStore) -> None:
    saved = _checkpoint(3)
    manifest = store.save(saved)
    found = store.load_newest("pseudo")
    assert found is not None
    assert found.manifest == manifest
    assert found.model["weight"].tobytes() == saved.model["weight"].tobytes()
    assert found.optimizer["weight.step"] == 3.0
    assert _newest_step(store, "real") is None


def test_a_torn_write_is_ignored_and_replaced(store: CheckpointStore) -> None:
    for step in (1, 2):
        store.save(_checkpoint(step))
    torn = store.folder / "pseudo-00000002"
    (torn / "manifest.json").unlink()
    (torn / "leftover").write_text("x")
    assert _newest_step(store) == 1
    store.save(_checkpoint(2))
    assert _newest_step(store) == 2
    assert not (torn / "leftover").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_flipped_bit_is_found_and_the_one_before_is_taken(
    store: CheckpointStore, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        store.save(_checkpoint(step))
    path = store.folder / "pseudo-00000002" / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert _newest_step(store) == 1
    said = capsys.readouterr().out
    assert file in said
    assert "pseudo-00000002" in said


def test_nothing_sound_is_an_error_not_a_fresh_start(store: CheckpointStore) -> None:
    store.save(_checkpoint(1))
    (store.folder / "pseudo-00000001" / "model.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match="every checkpoint of phase pseudo"):
        store.load_newest("pseudo")


def test_another_jobs_checkpoint_is_refused(store: CheckpointStore, tmp_path: Path) -> None:
    store.save(_checkpoint(1))
    with pytest.raises(TrainingError, match="belongs to job tiny with uid u1, not u2"):
        CheckpointStore(tmp_path, "u2").load_newest("pseudo")


def test_retention_keeps_the_newest_and_the_ends_of_phases(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        store.save(_checkpoint(step))
    store.save(_checkpoint(4, complete=True))
    store.save(_checkpoint(4, "real", delinked=True))
    for step in (5, 6, 7):
        store.save(_checkpoint(step, "real"))
        store.prune(2)
    assert [m.name for m in store.committed()] == [
        "pseudo-00000004",
        "real-00000004",
        "real-00000006",
        "real-00000007",
    ]


def test_an_attempt_that_was_replaced_may_not_commit(tmp_path: Path) -> None:
    Fence(tmp_path, 1).claim()
    Fence(tmp_path, 2).claim()
    with pytest.raises(TrainingError, match="attempt 1 was replaced by attempt 2"):
        Fence(tmp_path, 1).check()
    Fence(tmp_path, 2).check()
