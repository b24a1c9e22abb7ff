"""A forged manifest or link must not lead reads or removals out of the folder of checkpoints."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pseudoreal_api.resolved.config import DiscardConfig
from pseudoreal_trainer.checkpoint.heads import MANIFEST
from pseudoreal_trainer.checkpoint.lineage import LINEAGE, continued_stores
from pseudoreal_trainer.checkpoint.store import CheckpointStore, remove
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.storage.path import StoragePath
from pseudoreal_trainer.storage.storage import storage_of
from pydantic import ValidationError

from tests.unit.trainer.checkpoint.support.by_hand import committed
from tests.unit.trainer.storage.support.object_server import UID

NAMES = ["pseudo-00000001", "pseudo-00000002"]
OUTSIDE = ["../../precious", "/precious", "..", ".", "a/../../precious", "Upper", "x\n", ""]


@pytest.fixture
def saved(store: CheckpointStore) -> CheckpointStore:
    """Two checkpoints, with unrelated files inside the job's folder and beside it."""
    for step in (1, 2):
        committed(store, step, uid=UID)
    for place in _precious(store):
        storage_of(place.parent).make_folder()
        storage_of(place).replace("precious")
    return replace(store)  # it has not read the manifests yet


def _precious(store: CheckpointStore) -> list[StoragePath]:
    work = store.work_directory
    return [work.parent / "precious" / "file", work / "precious" / "file", store.folder / "precious" / "file"]


def _edit(store: CheckpointStore, name: str, **changes: Any) -> None:
    file = storage_of(store.folder / name / MANIFEST)
    file.replace(json.dumps(json.loads(file.read()) | changes, indent=1))


def _assert_nothing_else_went(store: CheckpointStore) -> None:
    for place in _precious(store):
        assert storage_of(place).read() == b"precious"


@pytest.mark.parametrize("phase", OUTSIDE)
def test_a_manifest_whose_phase_is_a_path_counts_as_not_committed(saved: CheckpointStore, phase: str) -> None:
    _edit(saved, NAMES[0], phase=phase)
    rule = {name: [DiscardConfig(before_execution=9, from_step=0)] for name in ("pseudo", phase)}
    discarding = CheckpointStore(saved.work_directory, UID, rule)
    assert saved.prune(1, None) == []
    assert discarding.prune(1, None) == [NAMES[1]]
    assert saved.names() == {NAMES[0]}
    _assert_nothing_else_went(saved)


@pytest.mark.parametrize("folder", OUTSIDE)
@pytest.mark.parametrize("field", ["link", "files"])
def test_a_manifest_that_refers_to_files_elsewhere_counts_as_not_committed(
    saved: CheckpointStore, folder: str, field: str
) -> None:
    link = {"folder": folder, "blocks": [0], "firstMomentDivisor": 1, "secondMomentDivisor": 1}
    files = {f"{folder}/file": {"sha256": "0" * 64, "size": 8}}
    _edit(saved, NAMES[1], **{field: {"link": link, "files": files}[field]})
    found = saved.newest("pseudo")
    assert found is not None
    assert found.manifest.name == NAMES[0]


def test_a_checkpoint_in_a_folder_with_another_name_is_neither_read_nor_removed(saved: CheckpointStore) -> None:
    """The folder of step 1 holds a manifest of step 2: removing that checkpoint would remove the other folder."""
    _edit(saved, NAMES[0], step=2)
    assert [manifest.name for manifest in saved.committed()] == [NAMES[1]]
    assert saved.prune(1, None) == []
    assert saved.names() == {*NAMES}


@pytest.mark.parametrize("name", ["../../precious-11111111", "/precious-11111111", ".."])
def test_a_lineage_that_leads_elsewhere_is_refused(saved: CheckpointStore, config: Any, name: str) -> None:
    storage_of(saved.work_directory / LINEAGE).replace(json.dumps({"continues": name}))
    new = config(0).model_copy(update={"continues": str(saved.work_directory), "object_storage": None})
    with pytest.raises(TrainingError, match=r"lineage.json makes no sense"):
        continued_stores(new.model_copy(update={"work_directory": str(saved.work_directory) + "-new"}))


@pytest.fixture
def linked(tmp_path: Path) -> tuple[CheckpointStore, Path]:
    """A folder of checkpoints in which one is a symbolic link to a folder elsewhere, which contains a symbolic link to
    a file."""
    store = CheckpointStore(tmp_path / "work", UID)
    for step in (1, 2):
        committed(store, step, uid=UID)
    first, elsewhere = tmp_path / "work" / "checkpoints" / NAMES[0], tmp_path / "elsewhere"
    first.rename(elsewhere)
    (tmp_path / "file").write_text("precious")
    (elsewhere / "more").symlink_to(tmp_path / "file")
    first.symlink_to(elsewhere)
    return store, elsewhere


def test_of_a_checkpoint_that_is_a_symbolic_link_the_link_alone_is_removed(
    linked: tuple[CheckpointStore, Path],
) -> None:
    store, elsewhere = linked
    before = sorted(path.name for path in elsewhere.iterdir())
    assert [manifest.name for manifest in store.committed()] == NAMES
    assert store.prune(1, None) == [NAMES[0]]
    assert store.names() == {NAMES[1]}
    assert sorted(path.name for path in elsewhere.iterdir()) == before
    assert MANIFEST in before


def test_a_symbolic_link_in_a_checkpoint_is_removed_and_its_target_stays(linked: tuple[CheckpointStore, Path]) -> None:
    _, elsewhere = linked
    remove(elsewhere)
    assert not elsewhere.exists()
    assert (elsewhere.parent / "file").read_text() == "precious"


def test_a_command_refuses_a_checkpoint_whose_folder_has_another_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, UID)
    committed(store, 1, uid=UID)
    copy = tmp_path / "checkpoints" / NAMES[0]
    copy.rename(copy.with_name("put-aside"))
    for command in (("inspect",), ("delink", "--to", "real")):
        ended = CliRunner().invoke(main, [command[0], str(copy.with_name("put-aside")), *command[1:]])
        said = " ".join(ended.stderr.split())
        assert ended.exit_code == 2
        assert "holds the manifest of pseudo-00000001; give the folder that name" in said


def test_a_manifest_of_deep_json_is_no_manifest(saved: CheckpointStore) -> None:
    storage_of(saved.folder / NAMES[1] / MANIFEST).replace('{"imported": ' + '{"a": ' * 100_000)
    assert [manifest.name for manifest in saved.committed()] == NAMES[:1]


def test_a_step_has_the_digits_of_a_name(saved: CheckpointStore) -> None:
    manifest = saved.reader(saved.committed()[0]).manifest
    for step in (-1, 10**20):
        with pytest.raises(ValidationError):
            manifest.revised(step=step)
