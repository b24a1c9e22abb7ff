"""Requests to the storage by saves and starts: independent of the number of kept checkpoints, and not quadratic in the
number of ranks."""

import errno
import gc
import hashlib
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pseudoreal_api.resolved.config import CheckpointPolicy
from pseudoreal_trainer.checkpoint import heads as heads_of
from pseudoreal_trainer.checkpoint.fence import Fence
from pseudoreal_trainer.checkpoint.heads import MANIFEST, HeadCache
from pseudoreal_trainer.checkpoint.manifest import Manifest
from pseudoreal_trainer.checkpoint.manifest_text import manifest_text
from pseudoreal_trainer.checkpoint.origin import Resumed, find_origin
from pseudoreal_trainer.checkpoint.pieces import tensors_of
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore, CorruptCheckpoint
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.storage.files import FileStorage
from pseudoreal_trainer.storage.path import ObjectPath
from pseudoreal_trainer.storage.services import StorageUnavailable
from pseudoreal_trainer.storage.storage import storage_of

from tests.unit.trainer.checkpoint.support.by_hand import committed, manifest_of, save
from tests.unit.trainer.storage.support.object_server import UID, Bucket, store_of
from tests.unit.trainer.training.support import saves

_ASKING = ("exists", "read", "size", "sha256", "find", "folders", "remove_folder", "content", "glob")


@contextmanager
def _requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count requests by kind: file system calls, or the requests sent to object storage."""
    import s3fs

    counts = Counter[str]()

    def counted(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            counts[name] += 1
            return act(*arguments, **named)

        return call

    send = s3fs.S3FileSystem._call_s3

    async def sent(self: Any, method: str, *arguments: Any, **named: Any) -> Any:
        counts[method] += 1
        return await send(self, method, *arguments, **named)

    with monkeypatch.context() as patch:
        for name in _ASKING:
            patch.setattr(FileStorage, name, counted(name, getattr(FileStorage, name)))
        patch.setattr(heads_of, "_beginning", counted("beginning", heads_of._beginning))
        patch.setattr(s3fs.S3FileSystem, "_call_s3", sent)
        yield counts


def _save(store: CheckpointStore, step: int, keep_last: int) -> None:
    """Save like the first rank, except for the tensors' files."""
    committed(store, step, uid=UID)
    store.prune(keep_last, None, [], Fence(store.work_directory, 1).check)
    store.sweep(store.names())


@pytest.mark.parametrize("removes", [False, True])
def test_a_save_asks_for_as_little_with_many_checkpoints_as_with_few(
    store: CheckpointStore, removes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for kept in (2, 12):
        for step in range(10 * kept, 11 * kept):
            committed(store, step, uid=UID)
        store.prune(kept, None)
        with _requests(monkeypatch) as counts:
            _save(store, 11 * kept, kept if removes else kept + 1)
        assert len(store.committed()) == kept + (not removes)
        found.append(counts)
    assert found[0] == found[1]
    assert found[0]["beginning"] == 0, "it has written them all"


def test_a_later_execution_reads_each_head_once_and_no_manifest(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 7):
        committed(store, step, uid=UID)
    later = replace(store)
    with _requests(monkeypatch) as counts:
        assert [head.step for head in later.committed()] == [1, 2, 3, 4, 5, 6]
    assert counts == ({"find": 1, "beginning": 6} if isinstance(store.folder, Path) else _listed(6))
    with _requests(monkeypatch) as counts:
        assert [head.step for head in later.committed()] == [1, 2, 3, 4, 5, 6]
    assert counts == ({"find": 1} if isinstance(store.folder, Path) else _listed(0))


def _listed(read: int) -> dict[str, int]:
    return {"list_objects_v2": 1} | ({"get_object": read} if read else {})


def test_checkpoints_committed_or_removed_by_another_process_are_noticed(store: CheckpointStore) -> None:
    other = replace(store)
    for step in (1, 2):
        committed(store, step, uid=UID)
    assert [head.step for head in other.committed()] == [1, 2]
    committed(store, 3, uid=UID)
    store.prune(2, None)
    assert [head.step for head in other.committed()] == [2, 3]


def test_a_checkpoint_that_another_process_made_again_is_seen(tmp_path: Path) -> None:
    store, other = (CheckpointStore(tmp_path, UID) for _ in range(2))
    committed(store, 1, uid=UID)
    assert [head.execution for head in other.committed()] == [1]
    save(store, manifest_of(1, uid=UID, execution=2), {"norm.weight": np.zeros(3, np.float32)})
    assert [head.execution for head in other.committed()] == [2]


def test_a_commit_is_one_whether_or_not_its_manifest_can_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, look = CheckpointStore(tmp_path, UID), Path.stat

    def stale(path: Path, **named: Any) -> Any:
        found = look(path, **named)
        if path.name == MANIFEST:
            raise OSError(errno.ESTALE, "Stale file handle")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", stale)
        committed(store, 1, uid=UID)
    assert [head.step for head in store.committed()] == [1]


def test_a_manifest_that_is_restated_is_read_as_it_is(store: CheckpointStore) -> None:
    manifest = committed(store, 1, uid=UID)
    assert not store.committed()[0].phase_complete
    store.restate(manifest.revised(phase_complete=True))
    assert store.committed()[0].phase_complete
    assert store.committed() == replace(store).committed()


@pytest.fixture
def of_1024_ranks(tmp_path: Path) -> tuple[CheckpointStore, Manifest]:
    """A checkpoint of 80 blocks on 1,024 ranks; each file has one byte."""
    store, digest = CheckpointStore(tmp_path / "work", UID), hashlib.sha256(b"x").hexdigest()
    manifest = manifest_of(1, uid=UID).revised(
        tensors=tensors_of(saves.layout_of(1024), saves.UNITS, "float32"), files=saves.files_of(1024, digest)
    )
    folder = store.begin(manifest)
    assert isinstance(folder, Path)
    for name in manifest.files:
        (folder / name).write_bytes(b"x")
    store.commit(manifest)
    return replace(store), manifest


class Rank:
    """One of 1,024 ranks; no other rank finds a fault. `said` holds the broadcasts of the first rank."""

    def __init__(self, rank: int, said: list[Any]) -> None:
        self.rank, self.world, self._said, self._turn = rank, 1024, said, iter(list(said))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def _hear(self, value: Any) -> Any:
        if self.is_first:
            self._said.append(value)
            return value
        return next(self._turn)

    from_first = digest_from_first = _hear

    def total(self, value: int) -> int:
        return value


def test_a_rank_of_1024_makes_three_requests_at_a_start_besides_those_for_content(
    of_1024_ranks: tuple[CheckpointStore, Manifest], config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, manifest = of_1024_ranks
    said: list[Any] = []
    for rank in (0, 700):
        with _requests(monkeypatch) as counts:
            origin = find_origin(config(0), replace(store), Rank(rank, said))
        assert isinstance(origin, Resumed)
        assert origin.checkpoint.manifest == manifest
        contents = counts.pop("sha256")
        assert contents == 2, "the files that it verifies"
        first = {"find": 1, "beginning": 1, "read": 1} if rank == 0 else {}
        assert counts == Counter({"read": 1, "size": 2}) + Counter(first)
        assert sum(counts.values()) - sum(first.values()) <= 4


def test_object_storage_is_not_asked_for_what_it_shows_at_once(
    bucket: Bucket, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(bucket)
    committed(store, 1, uid=UID)
    said: list[Any] = []
    for rank in (0, 1):
        with _requests(monkeypatch) as counts:
            origin = find_origin(config(0), replace(store), Rank(rank, said))
        assert isinstance(origin, Resumed)
        # The size of the manifest and of the file that the rank verifies, and the content of both.
        expected = Counter({"head_object": 2, "get_object": 2})
        if rank == 0:
            expected += Counter({"list_objects_v2": 1, "get_object": 2, "head_object": 1})
        assert counts == expected


def test_a_file_that_a_rank_does_not_see_yet_is_waited_for_where_it_is_opened(
    of_1024_ranks: tuple[CheckpointStore, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank has verified the file, so it must appear."""
    store, manifest = of_1024_ranks
    looks: list[Path] = []

    class Opened:
        def __init__(self, path: Path) -> None:
            looks.append(path)
            if len(looks) < 4:
                raise FileNotFoundError(2, "not yet", str(path))

    monkeypatch.setattr("pseudoreal_trainer.checkpoint.reader.TensorFile", Opened)
    monkeypatch.setattr("pseudoreal_trainer.checkpoint.visibility._AGAIN_SECONDS", 0.001)
    late, other = (Reader(manifest, store.folder, awaits_files=awaits) for awaits in (True, False))
    assert isinstance(late._file("weights", 5), Opened)
    assert len(looks) == 4
    looks.clear()
    with pytest.raises(FileNotFoundError):
        other._file("weights", 5)


def test_heads_of_many_large_manifests_take_little_memory(tmp_path: Path) -> None:
    """Each manifest has 0.5 MB of text, which would become 3.3 MB of objects."""
    store, ranks, count = CheckpointStore(tmp_path, UID), 64, 40
    manifest = manifest_of(0, uid=UID).revised(
        tensors=tensors_of(saves.layout_of(ranks), saves.UNITS, "float32"), files=saves.files_of(ranks)
    )
    text = manifest_text(manifest)
    assert len(text) > 400_000
    saves.keep(store, manifest, text, range(1, count + 1))
    store.committed()
    tracemalloc.start()
    try:
        assert len(replace(store).committed()) == count
        used, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < count * 40_000, f"{used:,} bytes are held"


def test_a_manifest_whose_middle_makes_no_sense_is_corrupt_and_the_one_before_is_taken(store: CheckpointStore) -> None:
    """Head and end of the manifest are intact."""
    for step in (1, 2):
        committed(store, step, uid=UID)
    file = storage_of(store.folder / "pseudo-00000002" / MANIFEST)
    file.replace(file.read().decode().replace('"pieces": [', '"pieces": ]'))
    later = replace(store)
    assert [head.step for head in later.committed()] == [1, 2]
    with pytest.raises(CorruptCheckpoint, match=r"pseudo-00000002/manifest.json makes no sense"):
        later.verify(later.committed()[1])
    found = later.newest("pseudo")
    assert found is not None
    assert found.manifest.step == 1


def test_a_manifest_that_was_cut_off_after_its_head_counts_as_not_committed(store: CheckpointStore) -> None:
    """Truncation happens on a volume without atomic rename. Object storage truncates nothing, so there the manifest
    counts as corrupt."""
    for step in (1, 2):
        committed(store, step, uid=UID)
    file = storage_of(store.folder / "pseudo-00000002" / MANIFEST)
    file.replace(file.read().decode()[:-1])
    later = replace(store)
    assert [head.step for head in later.committed()] == ([1] if isinstance(store.folder, Path) else [1, 2])
    found = later.newest("pseudo")
    assert found is not None
    assert found.manifest.step == 1


def test_an_execution_that_is_replaced_after_its_commit_removes_nothing(store: CheckpointStore) -> None:
    fence = Fence(store.work_directory, 1)
    fence.claim()
    for step in (1, 2, 3):
        committed(store, step, uid=UID)
    storage_of(store.folder / "pseudo-00000009").make_folder()
    storage_of(store.folder / "pseudo-00000009" / "weights-00000.safetensors").replace("half")
    Fence(store.work_directory, 2).claim()
    before = store.names()
    with pytest.raises(TrainingError, match="execution 1 was replaced by execution 2"):
        store.prune(1, None, (), fence.check)
    with pytest.raises(TrainingError, match="execution 1 was replaced by execution 2"):
        store.sweep(before, fence.check)
    assert store.names() == before
    assert len(replace(store).committed()) == 3


def test_an_execution_that_is_replaced_while_it_removes_stops_there(store: CheckpointStore) -> None:
    for step in (1, 2, 3, 4):
        committed(store, step, uid=UID)
    turns = iter([True, False])

    def may_remove() -> None:
        if not next(turns):
            raise TrainingError("replaced")

    with pytest.raises(TrainingError, match="replaced"):
        store.prune(1, None, (), may_remove)
    assert [head.step for head in replace(store).committed()] == [2, 3, 4]


def test_objects_of_a_checkpoint_are_removed_together(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ObjectPath(bucket.url)
    for number in range(20):
        bucket.write(f"one/file-{number}", b"x")
    bucket.write("one/manifest.json", b"x")
    bucket.write("two/file", b"x")
    with _requests(monkeypatch) as counts:
        storage_of(folder / "one").remove_folder("manifest.json")
    assert counts == {"list_objects_v2": 2, "delete_object": 1, "delete_objects": 1}
    with _requests(monkeypatch) as counts:
        storage_of(folder / "one").remove_folder("manifest.json")
    assert counts == {"list_objects_v2": 1}
    assert bucket.found() == ["two/file"]


@pytest.mark.parametrize("how", ["fails", "removes some"])
def test_a_server_that_does_not_remove_many_at_once_is_asked_for_each(
    how: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some servers do not support the bulk request, and its response does not name the objects that were not
    removed."""
    import s3fs

    async def refuses(_: Any, paths: list[str], **__: Any) -> list[str]:
        if how == "fails":
            raise NotImplementedError("A header you provided implies functionality that is not implemented")
        return paths[:1]

    for name in ("one/a", "one/b", "one/manifest.json"):
        bucket.write(name, b"x")
    monkeypatch.setattr(s3fs.S3FileSystem, "_bulk_delete", refuses)
    storage_of(ObjectPath(bucket.url) / "one").remove_folder("manifest.json")
    assert bucket.found() == []


def test_removal_of_a_checkpoint_starts_with_its_manifest(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    committed(store, 1, uid=UID)
    send = s3fs.S3FileSystem._call_s3

    def cut(*_: Any) -> None:
        raise OSError("the line is cut")

    async def sent(self: Any, method: str, *arguments: Any, **named: Any) -> Any:
        if method.startswith("delete_object") and not named.get("Key", "").endswith(MANIFEST):
            cut()
        return await send(self, method, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", cut)
        patch.setattr(s3fs.S3FileSystem, "_call_s3", sent)
        with pytest.raises((OSError, StorageUnavailable), match="cut"):
            store.begin(manifest_of(1, uid=UID))
    assert HeadCache(store.folder).all() == []
    assert store.names() == {"pseudo-00000001"}


@pytest.fixture
def with_200(tmp_path: Path) -> CheckpointStore:
    """200 checkpoints of 1,024 ranks; the files of the oldest three have one byte each."""
    store, manifest = CheckpointStore(tmp_path, "u1"), manifest_of(1)
    full = manifest.revised(
        tensors=tensors_of(saves.layout_of(1024), saves.UNITS, "float32"), files=saves.files_of(1024)
    )
    saves.keep(store, full, manifest_text(full), range(1, 201))
    for step in (1, 2, 3):
        for name in full.files:
            (tmp_path / "checkpoints" / f"pseudo-{step:08d}" / name).write_bytes(b"x")
    return store


POLICY = CheckpointPolicy(every_steps=1, mode="Async", buffer_bytes="1Mi", keep_last=200)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_saves_of_1024_ranks_hold_the_interpreter_for_50_ms(
    rank: int, with_200: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 200 checkpoints; each save removes a checkpoint with 2,048 files."""
    assert len(with_200.committed()) == 200
    saver = saves.saver_of(with_200, rank, 1024, POLICY, monkeypatch)
    gc.collect()  # what came before the first save is not of it
    seconds = [saves.save(saver, manifest_of(step)) for step in (201, 202, 203)]
    assert max(seconds) < 0.05, seconds
    assert len(with_200.committed()) == 200


@pytest.mark.long
def test_manifests_of_1024_ranks_take_less_than_100_mb(
    with_200: CheckpointStore, of_1024_ranks: tuple[CheckpointStore, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of the first rank, which starts from one manifest and saves another."""
    started, manifest = of_1024_ranks
    digest, kept = started.digest(manifest), []
    tracemalloc.start()
    try:
        kept.append(started.manifest_when_visible(manifest.name, digest))
        saves.save(saves.saver_of(with_200, 0, 1024, POLICY, monkeypatch), manifest_of(201))
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000_000
    assert held < 10_000_000, "heads, and the pieces of two layouts"
    assert kept == [manifest]
