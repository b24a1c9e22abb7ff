"""What object storage promises, on servers that stand for each cloud: with the clients and conditions of each."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from pseudoreal_trainer.checkpoint.fence import Fence
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.data.prepare.group import Work, prepare_group
from pseudoreal_trainer.data.prepare.inputs import find_inputs, groups_of
from pseudoreal_trainer.data.prepare.reading.files import RemoteFile
from pseudoreal_trainer.data.prepare.settings import Settings
from pseudoreal_trainer.data.tokenizer.tokenizer import ByteTokenizer
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.storage import objects
from pseudoreal_trainer.storage.objects import ObjectStorage
from pseudoreal_trainer.storage.path import ObjectPath, storage_path
from pseudoreal_trainer.storage.services import StorageUnavailable
from pseudoreal_trainer.ui.following import FollowedFolder

from tests.clouds.conftest import Bucket
from tests.unit.trainer.data.prepare.support import corpora
from tests.unit.trainer.data.prepare.support.silent import Silent
from tests.unit.trainer.data.prepare.support.small import TEXTS
from tests.unit.trainer.storage.support.object_server import store_of
from tests.unit.trainer.storage.test_either_storage import (
    test_execution_that_is_replaced_while_it_writes_does_not_commit as test_a_replaced_execution_does_not_commit,
)
from tests.unit.trainer.storage.test_object_storage import local
from tests.unit.trainer.storage.test_object_storage import (
    test_job_resumed_from_object_storage_equals_an_uninterrupted_one as test_a_resumed_job_equals_an_uninterrupted_one,
)
from tests.unit.trainer.storage.test_object_storage import (
    test_late_execution_replaces_neither_file_nor_manifest as test_a_late_execution_replaces_nothing,
)

# Tests of S3, here with the other clouds.
__all__ = [
    "local",
    "test_a_late_execution_replaces_nothing",
    "test_a_replaced_execution_does_not_commit",
    "test_a_resumed_job_equals_an_uninterrupted_one",
]

pytestmark = pytest.mark.integration

PART = 5 << 20
CONTENT = np.random.default_rng(0).integers(0, 255, 2 * PART + 1, dtype=np.uint8)


@pytest.fixture
def folder(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> ObjectPath:
    """A folder without objects. Uploads have several parts of the least size that the service takes."""
    monkeypatch.setattr(objects, "_PART_BYTES", PART)
    path = storage_path(f"{bucket.url}/job")
    assert isinstance(path, ObjectPath)
    return path


def _write(path: ObjectPath, content: np.ndarray[Any, Any] = CONTENT) -> None:
    output = ObjectStorage(path).output(len(content))
    output.write(content.data[: PART - 1])
    output.write(content.data[PART - 1 :])
    output.finish()


def test_an_object_is_replaced_created_once_and_read(folder: ObjectPath, bucket: Bucket) -> None:
    storage = ObjectStorage(folder / "a")
    assert not storage.exists()
    for text in ("old", "newer"):
        storage.replace(text)
    assert (storage.read(), storage.size(), storage.exists()) == (b"newer", 5, True)
    ObjectStorage(folder / "b").create("x")
    ObjectStorage(folder / "b").create("x")  # a request whose answer was lost is made twice
    with pytest.raises(FileExistsError, match="is there already: another execution has written it meanwhile"):
        ObjectStorage(folder / "b").create("y")
    assert bucket.read("job/b") == b"x"
    with pytest.raises(FileNotFoundError):
        ObjectStorage(folder / "none").read()


def test_an_upload_appears_when_it_is_finished_and_replaces_nothing(folder: ObjectPath, bucket: Bucket) -> None:
    path = folder / "c" / "big"
    late = ObjectStorage(path).output(len(CONTENT))
    late.write(CONTENT.data[: 2 * PART])
    assert bucket.found() == []
    _write(path, CONTENT[::-1].copy())
    late.write(CONTENT.data[2 * PART :])
    with pytest.raises(FileExistsError, match="another execution has written it meanwhile"):
        late.finish()
    late.close()
    assert bucket.read("job/c/big") == CONTENT[::-1].tobytes()
    given_up = ObjectStorage(folder / "c" / "none").output(len(CONTENT))
    given_up.write(CONTENT.data[: 2 * PART])
    given_up.close()
    assert bucket.found() == ["job/c/big"]


@pytest.mark.parametrize("size", [0, 10, PART, len(CONTENT)])
def test_an_upload_of_any_size_is_the_content(size: int, folder: ObjectPath, bucket: Bucket) -> None:
    _write(folder / "a", CONTENT[:size])
    assert bucket.read("job/a") == CONTENT[:size].tobytes()
    assert ObjectStorage(folder / "a").sha256() == hashlib.sha256(CONTENT[:size].tobytes()).hexdigest()


def test_ranges_and_beginnings_are_read(folder: ObjectPath) -> None:
    _write(folder / "a")
    found = objects.read_ranges([(folder / "a", 0, 10), (folder / "a", 2 * PART, len(CONTENT))])
    assert found == [CONTENT[:10].tobytes(), CONTENT[2 * PART :].tobytes()]
    assert objects.read_beginnings([folder / "a", folder / "b"], 5) == [CONTENT[:5].tobytes(), None]
    part = np.empty(100, np.uint8)
    ObjectStorage(folder / "a").content().read_into(1000, part)
    assert (part == CONTENT[1000:1100]).all()


def test_folders_are_listed_searched_and_removed(folder: ObjectPath, bucket: Bucket) -> None:
    assert ObjectStorage(folder).folders() == []
    for name in ("1/manifest", "1/a", "1/b/c", "2/manifest", "10/manifest"):
        bucket.write(f"job/{name}", b"x")
    assert sorted(each.name for each in ObjectStorage(folder).folders()) == ["1", "10", "2"]
    assert ObjectStorage(folder).glob("*/manifest") == [folder / f"{name}" / "manifest" for name in ("1", "10", "2")]
    ObjectStorage(folder / "1").remove_folder("manifest")
    ObjectStorage(folder / "3").remove_folder("manifest")
    assert sorted(bucket.found()) == ["job/10/manifest", "job/2/manifest"]


def test_a_bucket_that_is_not_there_is_unavailable_and_not_empty(folder: ObjectPath, bucket: Bucket) -> None:
    bucket.delete()
    asked: list[Callable[[], Any]] = [
        lambda: ObjectStorage(folder).folders(),
        lambda: ObjectStorage(folder / "a").replace("x"),
        lambda: ObjectStorage(folder / "a").create("x"),
        lambda: _write(folder / "a"),
        lambda: store_of(bucket).committed(),
        lambda: Fence(store_of(bucket).work_directory, 3).claim(),
    ]
    for ask in asked:
        with pytest.raises(StorageUnavailable, match=rf"does not give access to {bucket.url}.*; check the "):
            ask()


def test_text_is_prepared_from_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    lines = corpora.json_lines(TEXTS)
    (tmp_path / "a.jsonl").write_bytes(lines)
    bucket.write("text/en/a.jsonl", lines)
    bucket.write("text/meta.json", json.dumps({}).encode())
    found: dict[str, list[bytes]] = {}
    for place in (str(tmp_path / "a.jsonl"), f"{bucket.url}/text", f"{bucket.url}/text/**/*.jsonl"):
        [group] = groups_of(find_inputs([place]))
        output = tmp_path / f"tokens-{len(found)}"
        output.mkdir()
        prepare_group(Work(group, Settings(shard_bytes=600), output), ByteTokenizer(), Silent())
        found[place] = [file.read_bytes() for file in sorted(output.glob("*.bin"))]
    first, *others = found.values()
    assert len(first) == 3
    assert others == [first] * 2
    [group] = groups_of(find_inputs([f"{bucket.url}/text"]))
    file = group.inputs[0].files[0]
    assert isinstance(file, RemoteFile)
    assert file.version, "each service names the version of an object"
    bucket.write("text/en/a.jsonl", lines + b"\n")
    with pytest.raises(TrainingError, match="has changed while it was read"):
        group.inputs[0].check_unchanged()


def test_a_page_shows_a_job_of_any_cloud_and_follows_it(
    bucket: Bucket, config: Callable[..., Any], train: Callable[..., Any], tmp_path: Path
) -> None:
    """The written page, and the live one: it reads new parts of the metrics, and only these."""
    url = f"{bucket.url}/job"
    first = config(0).model_copy(update={"object_storage": url})
    train(first)
    followed = FollowedFolder(storage_path(url))
    files = followed.read()
    assert files is not None
    assert [*files.steps.step] == [1, 2, 3, 4, 5, 6]
    assert [head.name for head in files.checkpoints] == ["pseudo-00000005", "pseudo-00000006"]
    assert followed.read() is None
    shown = CliRunner().invoke(main, ["report", url, "-o", str(tmp_path / "page.html")])
    assert shown.exit_code == 0, shown.output
    page = (tmp_path / "page.html").read_text()
    assert all(text in page for text in ("pseudo-00000006", "at step 6", url))
    assert "has no history/" not in page

    part = next(key for key in bucket.found() if key.startswith("job/metrics/"))
    line = json.loads(bucket.read(part).splitlines()[-1])
    for step in (7, 8):
        bucket.write(f"job/metrics/{step:012d}/lines.jsonl", json.dumps(line | {"step": step}).encode() + b"\n")
        newer = followed.read()
        assert newer is not None
        assert newer.steps.step[-1] == step
    # A restart from the checkpoint of step 5 removes the parts after it.
    for key in [key for key in bucket.found() if key.startswith("job/metrics/") and int(key.split("/")[2]) > 5]:
        bucket.remove(key)
    again = followed.read()
    assert again is not None
    assert [*again.steps.step] == [1, 2, 3, 4, 5]
