"""Checkpoints that count, checkpoints that are refused, and checkpoints that are removed."""

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from pseudoreal_api.resolved.config import DiscardConfig
from pseudoreal_trainer.checkpoint.fence import Fence
from pseudoreal_trainer.checkpoint.manifest import Link, Manifest
from pseudoreal_trainer.checkpoint.store import CheckpointStore, CorruptCheckpoint, remove
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.storage.files import FileStorage

from tests.unit.trainer.checkpoint.support.by_hand import manifest_of, save

FILES = ["weights-00000.safetensors", "moments-00000.safetensors", "weights-00001.safetensors"]


def _save(store: CheckpointStore, step: int, phase: str = "pseudo", **changes: Any) -> Manifest:
    weights = {"norm.weight": np.full((2, 3), step, np.float32), "head.weight": np.arange(5, dtype=np.float32)}
    return save(store, manifest_of(step, phase, **changes), weights, pieces=2)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, "u1")


def _folder(store: CheckpointStore) -> Path:
    """The checkpoints are on a file system in these tests."""
    assert isinstance(store.folder, Path)
    return store.folder


def _newest_step(store: CheckpointStore, phase: str = "pseudo") -> int | None:
    found = store.newest(phase)
    if found is None:
        return None
    assert found.tensor("norm.weight")[0, 0] == found.manifest.step, "weights and manifest belong together"
    return found.manifest.step


def test_saved_checkpoint_is_read_unchanged(store: CheckpointStore) -> None:
    manifest = _save(store, 3)
    found = store.newest("pseudo")
    assert found is not None
    assert found.manifest == manifest
    assert found.whole("second_moment")["norm.weight"].tolist() == [[12.0] * 3] * 2
    assert found.tensor("head.weight", "first_moment").tolist() == [0, 2, 4, 6, 8]
    for begin in range(6):
        for end in range(begin, 6):
            assert found.read("head.weight", "weights", begin, min(end, 5)).tolist() == [*range(begin, min(end, 5))]
    assert _newest_step(store, "real") is None


def test_anyone_can_read_a_whole_tensor_with_the_library(store: CheckpointStore) -> None:
    from safetensors.numpy import load_file

    weights = {"norm.weight": np.arange(6, dtype=np.float64).reshape(2, 3)}
    save(store, manifest_of(1), weights)
    found = load_file(_folder(store) / "pseudo-00000001" / FILES[0])
    assert np.array_equal(found["norm.weight"], weights["norm.weight"])


def test_a_torn_write_is_ignored_and_replaced(store: CheckpointStore) -> None:
    for step in (1, 2):
        _save(store, step)
    torn = _folder(store) / "pseudo-00000002"
    (torn / "manifest.json").unlink()
    (torn / "leftover").write_text("x")
    assert _newest_step(store) == 1
    _save(store, 2)
    assert _newest_step(store) == 2
    assert not (torn / "leftover").exists()


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("place", ["header", "middle", "end"])
def test_a_flipped_bit_is_found_and_the_one_before_is_taken(
    store: CheckpointStore, file: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        _save(store, step)
    path = _folder(store) / "pseudo-00000002" / file
    content = bytearray(path.read_bytes())
    content[{"header": 3, "middle": len(content) // 2, "end": -1}[place]] ^= 1
    path.write_bytes(content)
    assert _newest_step(store) == 1
    said = capsys.readouterr().out
    assert str(path) in said


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_was_cut_or_lost_is_found(store: CheckpointStore, file: str) -> None:
    for step in (1, 2, 3):
        _save(store, step)
    cut, lost = (_folder(store) / f"pseudo-0000000{step}" / file for step in (2, 3))
    cut.write_bytes(cut.read_bytes()[:-1])
    lost.unlink()
    with pytest.raises(CorruptCheckpoint, match=rf"{file} has \d+ bytes; the manifest says \d+"):
        store.verify(store.committed()[1])
    with pytest.raises(CorruptCheckpoint, match=rf"{file} is not there"):
        store.verify(store.committed()[2])
    assert _newest_step(store) == 1


def test_each_rank_verifies_some_files_and_together_all(store: CheckpointStore) -> None:
    manifest = _save(store, 1)
    for name in manifest.files:
        path = _folder(store) / manifest.name / name
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        faults = 0
        for rank in range(3):
            try:
                store.verify(manifest, rank, 3)
            except CorruptCheckpoint:
                faults += 1
        assert faults == 1
        path.write_bytes(content)


def test_phase_with_only_corrupt_checkpoints_is_an_error_and_no_fresh_start(store: CheckpointStore) -> None:
    _save(store, 1)
    (_folder(store) / "pseudo-00000001" / FILES[0]).unlink()
    with pytest.raises(CorruptCheckpoint, match="every checkpoint of phase pseudo"):
        store.newest("pseudo")


def test_a_manifest_that_is_no_json_counts_as_not_committed(store: CheckpointStore) -> None:
    for step in (1, 2):
        _save(store, step)
    (_folder(store) / "pseudo-00000002" / "manifest.json").write_text('{"format": "pseudoreal ch')
    assert _newest_step(store) == 1


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        (2, "finish the job with the release that wrote it"),
        (3, "finish the job with the release that wrote it, before 0.3"),
        (6, "use the release that wrote it"),
    ],
)
def test_a_manifest_of_another_release_is_refused_not_passed_over(
    store: CheckpointStore, version: int, remedy: str
) -> None:
    for step in (1, 2):
        _save(store, step)
    path = _folder(store) / "pseudo-00000002" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"formatVersion": version}))
    says = rf"pseudo-00000002/manifest.json has format version {version}, and this release reads 4 and 5; {remedy}"
    with pytest.raises(TrainingError, match=says):
        store.newest("pseudo")


def test_another_jobs_checkpoint_is_refused(store: CheckpointStore, tmp_path: Path) -> None:
    _save(store, 1)
    with pytest.raises(TrainingError, match="belongs to job tiny with uid u1, not u2"):
        CheckpointStore(tmp_path, "u2").newest("pseudo")


def _names(store: CheckpointStore) -> list[str]:
    return [manifest.name for manifest in store.committed()]


def test_retention_keeps_the_newest_and_the_ends_of_phases(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        _save(store, step)
    _save(store, 4, phase_complete=True)
    _save(store, 4, "real", delinked=True)
    for step in (5, 6, 7):
        _save(store, step, "real")
        store.prune(2, None)
    assert _names(store) == ["pseudo-00000004", "real-00000004", "real-00000006", "real-00000007"]


def test_retention_keeps_every_so_many_steps_and_what_was_verified(store: CheckpointStore) -> None:
    for step in range(1, 9):
        _save(store, step)
    assert store.prune(1, 3, ["pseudo-00000002", "pseudo-00000004"]) == [
        "pseudo-00000001",
        "pseudo-00000005",
        "pseudo-00000007",
    ]
    assert _names(store) == [f"pseudo-0000000{step}" for step in (2, 3, 4, 6, 8)]


def test_sweep_removes_unfinished_checkpoints(store: CheckpointStore) -> None:
    _save(store, 1)
    for name in ("pseudo-00000002", "real-00000003"):
        (_folder(store) / name).mkdir()
        (_folder(store) / name / FILES[0]).write_text("half")
    (_folder(store) / "exported").mkdir()
    ours = store.names()
    assert ours == {"pseudo-00000001", "pseudo-00000002", "real-00000003"}
    (_folder(store) / "pseudo-00000004").mkdir()
    _save(store, 2)
    store.sweep(ours)
    here = sorted(path.name for path in _folder(store).iterdir())
    assert here == ["exported", "pseudo-00000001", "pseudo-00000002", "pseudo-00000004"]


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.committed() == [], "nothing was saved yet"
    _save(store, 1)

    def fails(_: object) -> NoReturn:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("os.listdir", fails)
        with pytest.raises(TrainingError, match="cannot be read, so nobody knows which checkpoint is the newest"):
            store.committed()
    with monkeypatch.context() as patch:
        patch.setattr("os.pread", lambda *_: fails(_))
        with pytest.raises(TrainingError, match=r"pseudo-00000001 cannot be read"):
            CheckpointStore(store.work_directory, "u1").committed()


@pytest.mark.parametrize("fails", ["size", "sha256"])
def test_a_file_that_cannot_be_read_is_not_a_corrupt_one(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The file may be intact: falling back to an older checkpoint would discard training."""
    for step in (1, 2):
        _save(store, step)

    def fail(_: object) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    manifest = store.whole(store.committed()[-1])
    monkeypatch.setattr(FileStorage, fails, fail)
    with pytest.raises(TrainingError, match=r"pseudo-00000002/\S+ cannot be read: .*move the checkpoint away") as error:
        store.newest("pseudo") if fails == "sha256" else store.check_sizes(manifest)
    assert not isinstance(error.value, CorruptCheckpoint)


def test_sweep_keeps_a_checkpoint_whose_manifest_cannot_be_looked_up(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(store, 1)
    ours = store.names()
    look = Path.stat

    def fail(path: Path, **named: Any) -> Any:
        if path.name == "manifest.json":
            raise OSError(errno.ESTALE, "Stale file handle")
        return look(path, **named)

    monkeypatch.setattr(Path, "stat", fail)
    with pytest.raises(OSError, match="Stale"):
        replace(store).sweep(ours)


def test_retention_keeps_the_bytes_that_a_manifest_links_to(store: CheckpointStore) -> None:
    """The last checkpoint of the pseudo phase is kept in any case; here the link refers to an earlier one."""
    _save(store, 1)
    for step in (2, 3):
        _save(store, step)
    _linked(store, 3, "pseudo-00000001")
    store.prune(1, None)
    assert _names(store) == ["pseudo-00000001", "pseudo-00000003", "real-00000003"]
    assert store.newest("real") is not None


def _discarding(store: CheckpointStore, before_execution: int, from_step: int) -> CheckpointStore:
    rule = DiscardConfig(before_execution=before_execution, from_step=from_step)
    return replace(store, discards={"pseudo": [rule]})


def test_discarded_checkpoints_do_not_count(store: CheckpointStore) -> None:
    for step, execution in ((2, 1), (4, 2), (6, 1), (8, 3)):
        _save(store, step, execution=execution)
    _save(store, 8, "real", delinked=True)
    assert [m.step for m in _discarding(store, 3, 4).committed()] == [2, 8, 8]
    assert [m.step for m in _discarding(store, 2, 3).candidates("pseudo")] == [8, 4, 2]
    assert _newest_step(_discarding(store, 4, 3)) == 2
    assert _newest_step(_discarding(store, 4, 0)) is None
    assert _newest_step(_discarding(store, 4, 0), "real") == 8


def test_each_rule_discards(store: CheckpointStore) -> None:
    for step, execution in ((2, 1), (4, 1), (6, 2), (8, 2), (10, 3)):
        _save(store, step, execution=execution)
    rules = [DiscardConfig(before_execution=2, from_step=4), DiscardConfig(before_execution=3, from_step=8)]
    assert [m.step for m in replace(store, discards={"pseudo": rules}).committed()] == [2, 6, 10]


def test_retention_removes_what_is_discarded_and_what_refers_to_it(store: CheckpointStore) -> None:
    for step in (1, 2):
        _save(store, step)
    _save(store, 3, phase_complete=True)
    _linked(store, 3, "pseudo-00000003")
    _save(store, 2, execution=2)
    discarding = _discarding(store, 2, 2)
    assert discarding.prune(1, None, ["pseudo-00000001"]) == ["pseudo-00000003"]
    assert _names(store) == ["pseudo-00000001", "pseudo-00000002"]


def _linked(store: CheckpointStore, step: int, folder: str) -> None:
    link = Link(folder=folder, blocks=[0, 0], first_moment_divisor=2, second_moment_divisor=4)
    source = store.whole(next(head for head in store.committed() if head.name == folder))
    manifest = manifest_of(step, "real", delinked=True, link=link, tensors=source.tensors, files=source.files)
    store.begin(manifest)
    store.commit(manifest)


def test_no_committed_checkpoint_links_to_files_that_are_being_replaced(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(store, 3, phase_complete=True)
    _linked(store, 3, "pseudo-00000003")
    seen = []

    def look(folder: Path) -> None:
        for manifest in store.committed():
            store.verify(manifest)
        seen.append(_names(store))
        remove(folder)

    monkeypatch.setattr("pseudoreal_trainer.checkpoint.store.remove", look)
    store.begin(manifest_of(3, execution=2))
    assert seen == [["pseudo-00000003", "real-00000003"], ["pseudo-00000003"]]
    assert _names(store) == []


def test_ranks_of_a_pod_whose_place_was_taken_may_not_commit(tmp_path: Path) -> None:
    """The replaced pod may still run on a node that nobody can reach."""
    for membership in (0, 2):
        Fence(tmp_path, 1, membership).claim()
    with pytest.raises(TrainingError, match="a spare pod took a place in execution 1 with restart 2"):
        Fence(tmp_path, 1).check()
    Fence(tmp_path, 1, 2).check()
    Fence(tmp_path, 2).claim()
    Fence(tmp_path, 2).check()
    with pytest.raises(TrainingError, match="execution 1 was replaced by execution 2"):
        Fence(tmp_path, 1, 9).check()
    assert (tmp_path / "execution").read_text() == "2", "earlier releases read a number"


def test_stages_after_a_takeover_commit_and_the_replaced_pod_never_does(tmp_path: Path) -> None:
    """The delink and the next phase keep the execution's number and start with a membership of their own."""
    replaced = Fence(tmp_path, 4, phase=1)
    replaced.claim()
    Fence(tmp_path, 4, 2, phase=1).claim()
    for phase, membership in ((2, 0), (2, 0), (2, 1), (3, 0)):  # delink and phase, a takeover there, another delink
        Fence(tmp_path, 4, membership, phase=phase).claim()
        Fence(tmp_path, 4, membership, phase=phase).check()
        with pytest.raises(TrainingError, match=f"phase {phase} .* these ranks are of phase 1"):
            replaced.check()
    with pytest.raises(TrainingError, match="these ranks are of phase 2"):
        Fence(tmp_path, 4, 9, phase=2).claim()
    Fence(tmp_path, 5, phase=1).claim()  # the phase is repeated
    Fence(tmp_path, 5, phase=1).check()


def test_a_membership_that_release_0_3_wrote_is_of_an_earlier_stage(tmp_path: Path) -> None:
    (tmp_path / "execution").write_text("4")
    (tmp_path / "membership").write_text("4.2")
    Fence(tmp_path, 4, phase=2).claim()
    assert (tmp_path / "membership").read_text() == "4.0.2"


def test_an_execution_that_was_replaced_may_not_commit(tmp_path: Path) -> None:
    Fence(tmp_path, 1).claim()
    Fence(tmp_path, 2).claim()
    with pytest.raises(TrainingError, match="execution 1 was replaced by execution 2"):
        Fence(tmp_path, 1).check()
    Fence(tmp_path, 2).check()
