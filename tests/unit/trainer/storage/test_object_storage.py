"""Checkpoints on a real S3-compatible server: bit for bit the same state as on a file system."""

import gc
import importlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.fence import Fence
from pseudoreal_trainer.checkpoint.store import CheckpointStore, CorruptCheckpoint
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.data.corpus import load_corpus
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.plan.units import KINDS
from pseudoreal_trainer.storage import objects as object_storage
from pseudoreal_trainer.storage.objects import ObjectContent, ObjectOutput, ObjectStorage
from pseudoreal_trainer.storage.path import ObjectPath, storage_path
from pseudoreal_trainer.storage.services import StorageUnavailable
from pseudoreal_trainer.training.phase import train_phase

from tests.support.checkpoints import assert_same, newest
from tests.support.pods import start_pod
from tests.support.processes import Forked, preload
from tests.unit.trainer.storage.support.object_server import (
    FOLDER,
    UID,
    Bucket,
    forget_clients,
    store_of,
    use,
)

preload("tests.support.warm", "s3fs")

FILES = ["manifest.json", "moments-00000.safetensors", "weights-00000.safetensors"]


@pytest.fixture
def local(train_job: Callable[[str], Any], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    """The job's checkpoints on a file system, trained once for all tests, which only read them. Request it before
    `remote`, which changes the job."""
    folder = tmp_path_factory.getbasetemp() / "the whole job on files"
    if not folder.exists():
        train_job("local")
        (tmp_path / "local").rename(folder)
    return CheckpointStore(folder, UID)


def _steps(store: CheckpointStore) -> list[int]:
    return [manifest.step for manifest in store.committed()]


def _after(steps: int) -> Callable[[], bool]:
    """Return a function that asks to stop after `steps` steps."""
    calls = count(1)
    return lambda: next(calls) >= steps


def test_job_resumed_from_object_storage_equals_an_uninterrupted_one(
    local: CheckpointStore, remote: Bucket, config: Any, train: Any, tmp_path: Path
) -> None:
    assert train(config(0), _after(3)).outcome == "Yielded"
    assert _steps(store_of(remote)) == [2, 3]
    message = train(config(0, execution=2))
    assert (message.outcome, message.checkpoint) == ("Succeeded", "pseudo-00000006")
    assert_same(newest(local, "pseudo"), newest(store_of(remote), "pseudo"))
    assert remote.read(f"{FOLDER}/execution") == b"2"
    names = [f"pseudo-0000000{step}" for step in (2, 3, 4, 6)]
    assert _without_history(remote, starts=2) == [
        *(f"{FOLDER}/checkpoints/{name}/{file}" for name in names for file in FILES),
        f"{FOLDER}/execution",
        f"{FOLDER}/lineage.json",
        *_parts_of_metrics(2, 3, 4, 6),
    ]
    lines = (tmp_path / "work" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "work" / "checkpoints").exists()


def _without_history(bucket: Bucket, starts: int) -> list[str]:
    """Return the names of all objects but those that record the starts of phases, whose names hold the time."""
    names = sorted(bucket.found())
    history = [name for name in names if name.startswith(f"{FOLDER}/history/")]
    assert len(history) == starts
    return [name for name in names if name not in history]


def _parts_of_metrics(*steps: int) -> list[str]:
    return [f"{FOLDER}/metrics/{step:012d}/lines.jsonl" for step in steps]


def _names(bucket: Bucket) -> list[str]:
    return [manifest.name for manifest in store_of(bucket).committed()]


def test_a_whole_job_of_real_pods(
    local: CheckpointStore,
    remote: Bucket,
    endpoint: str,
    job_body: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`pseudoreal run`: a phase on one rank, a delink, and a phase on two ranks, which write two files each. The job
    contains the server's address; the environment contains another address, without a server."""
    use("http://127.0.0.1:1", monkeypatch)
    job_body["spec"]["checkpoint"]["storage"]["objectStorage"]["endpoint"] = endpoint
    del job_body["metadata"]["uid"]
    file, runs = tmp_path / "job.yaml", tmp_path / "runs"
    file.write_text(yaml.safe_dump(job_body))
    ended = CliRunner().invoke(main, ["run", str(file), "--workdir", str(runs)])
    assert ended.exit_code == 0, ended.output
    uid = json.loads((runs / "job.json").read_text())["uid"]
    store = CheckpointStore(storage_path(f"{remote.url}/tiny-{uid[:8]}"), uid)
    assert f"checkpoints: {store.folder}" in ended.stdout
    assert not (runs / "checkpoints").exists()
    assert_same(newest(local, "pseudo"), newest(store, "pseudo"))
    found, expected = newest(store, "real"), newest(local, "real")
    assert [*found.manifest.files] == [
        f"{kind}-0000{rank}.safetensors" for rank in (0, 1) for kind in ("weights", "moments")
    ]
    for name, array in expected.whole().items():
        np.testing.assert_allclose(found.tensor(name), array, rtol=0, atol=1e-11)
    start = next(manifest for manifest in store.committed("real") if manifest.delinked)
    assert start.link is not None
    assert [key for key in remote.found() if start.name in key] == [
        f"tiny-{uid[:8]}/checkpoints/{start.name}/manifest.json"
    ]
    again = CliRunner().invoke(main, ["run", str(file), "--workdir", str(runs), "--resume"])
    assert again.exit_code == 0, again.output
    assert "finished at step" not in again.stdout, "both phases are done"


def test_the_delinked_checkpoint_reads_the_same_as_on_a_file_system(
    local: CheckpointStore, remote: Bucket, config: Any, delink_of: Any, train: Any
) -> None:
    train(config(0))
    first = delink(delink_of(1))
    written = remote.read(f"{FOLDER}/checkpoints/real-00000006/manifest.json")
    assert delink(delink_of(1)) == first
    assert remote.read(f"{FOLDER}/checkpoints/real-00000006/manifest.json") == written
    there = next(manifest for manifest in local.committed("real") if manifest.delinked)
    assert_same(local.reader(there), newest(store_of(remote), "real"))


def _damage(bucket: Bucket, how: str, key: str) -> None:
    content = bucket.read(key)
    if how == "lost":
        bucket.remove(key)
    else:
        bucket.write(key, content[:-1] if how == "cut" else content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("how", "says", "file"),
    [("flipped", "has the SHA-256", FILES[1]), ("cut", "bytes; the", FILES[2]), ("lost", "is not there", FILES[2])],
)
def test_a_corrupt_object_is_named_and_the_checkpoint_before_is_taken(
    how: str, says: str, file: str, remote: Bucket, config: Any, train: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config(0))
    key = f"{FOLDER}/checkpoints/pseudo-00000006/{file}"
    _damage(remote, how, key)
    capsys.readouterr()
    assert newest(store_of(remote), "pseudo").manifest.step == 4
    said = capsys.readouterr().out
    assert f"{remote.url}/{key}" in said
    assert says in said
    assert train(config(0, execution=2)).outcome == "Succeeded"
    assert newest(store_of(remote), "pseudo").manifest.step == 6


def test_phase_with_only_corrupt_objects_is_an_error_and_no_fresh_start(
    remote: Bucket, config: Any, train: Any
) -> None:
    train(config(0), _after(2))
    _damage(remote, "lost", f"{FOLDER}/checkpoints/pseudo-00000002/{FILES[1]}")
    with pytest.raises(CorruptCheckpoint, match=f"every checkpoint of phase pseudo in {remote.url}/{FOLDER}/checkpoin"):
        train(config(0, execution=2))


def _train_until(environment: dict[str, str], config: PhaseConfig, call: str, deadly: int) -> None:
    """Train in a process that is killed in place of call number `deadly`."""
    os.environ.update(environment)
    owner = {"complete": ObjectStorage, "finish": ObjectOutput, "write": ObjectOutput}[call]
    act, calls = getattr(owner, call), count(1)

    def killed(self: Any, *arguments: Any) -> Any:
        if next(calls) == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return act(self, *arguments)

    setattr(owner, call, killed)
    corpus = load_corpus(config.data, config.model.sequence_length)
    train_phase(config, corpus, Ranks(0, 1, torch.device("cpu")), lambda: False)


@pytest.mark.parametrize(("call", "number"), [("complete", 2), ("finish", 4), ("write", 17)])
def test_a_writer_that_is_killed_leaves_the_checkpoint_before(
    call: str, number: int, local: CheckpointStore, remote: Bucket, config: Any, train: Any
) -> None:
    assert Forked(_train_until, dict(os.environ), config(0), call, number).wait() == -signal.SIGKILL
    before = _steps(store_of(remote))
    assert before == [2], "the first one was committed, the second one was not"
    if call == "complete":
        assert f"{FOLDER}/checkpoints/pseudo-00000004/{FILES[2]}" in remote.found(), "its files are there"
    assert newest(store_of(remote), "pseudo").manifest.step == 2
    train(config(0, execution=2))
    assert_same(newest(local, "pseudo"), newest(store_of(remote), "pseudo"))


def test_late_execution_replaces_neither_file_nor_manifest(remote: Bucket, config: Any, train: Any) -> None:
    """The late attempt has read the fence and then stalls; meanwhile its successor saves the same step."""
    train(config(0), _after(2))
    store = store_of(remote)
    manifest = store.whole(*store.committed())
    folder = store.folder / manifest.name
    written = {key: remote.read(key) for key in remote.found()}
    assert isinstance(folder, ObjectPath)
    late = ObjectOutput(folder / FILES[2], 100)
    late.write(memoryview(b"late"))
    with pytest.raises(FileExistsError, match=rf"{FILES[2]} is there already: another execution has written it"):
        late.finish()
    late.close()
    with pytest.raises(FileExistsError, match=r"manifest.json is there already"):
        store.commit(manifest.model_copy(update={"execution": 0}))
    assert {key: remote.read(key) for key in remote.found()} == written


def test_retention_removes_the_objects_of_what_it_does_not_keep(
    job_body: dict[str, Any], remote: Bucket, config: Any, delink_of: Any, train: Any
) -> None:
    job_body["spec"]["checkpoint"] |= {"keepLast": 1}
    job_body["spec"]["phases"][1]["workers"] = 1
    train(config(0))
    assert _names(remote) == ["pseudo-00000004", "pseudo-00000006"]
    delink(delink_of(1))
    train(config(1))
    kept = {"pseudo-00000006": FILES, "real-00000006": FILES[:1], "real-00000010": FILES, "real-00000012": FILES}
    assert _without_history(remote, starts=2) == sorted(
        [f"{FOLDER}/execution", f"{FOLDER}/lineage.json", f"{FOLDER}/membership"]
        + [f"{FOLDER}/checkpoints/{name}/{file}" for name, files in kept.items() for file in files]
        + _parts_of_metrics(2, 4, 6, 8, 10, 12)
    )


@pytest.mark.filterwarnings("error")
def test_a_file_appears_when_it_is_finished_and_never_when_it_is_given_up(bucket: Bucket) -> None:
    part, portion = 5 << 20, (1 << 20) + 7
    object_storage._PART_BYTES, before = part, object_storage._PART_BYTES
    try:
        kept, lost = (ObjectOutput(ObjectPath(f"{bucket.url}/{name}"), 1) for name in ("kept", "lost"))
    finally:
        object_storage._PART_BYTES = before
    content = os.urandom(2 * part + 3)
    for begin in range(0, len(content), portion):
        kept.write(memoryview(content)[begin : begin + portion])
    assert bucket.part_sizes() == [part, part]
    lost.write(memoryview(content))
    assert sorted(bucket.unfinished()) == ["kept", "lost"]
    assert bucket.found() == []
    kept.finish()
    kept.close()
    lost.close()
    del lost
    gc.collect()
    assert bucket.unfinished() == []
    assert bucket.found() == ["kept"]
    assert bucket.read("kept") == content


@pytest.mark.filterwarnings("error")
def test_a_part_that_is_refused_is_an_error_and_the_upload_is_given_up(
    remote: Bucket, config: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config(0), _after(2))
    write, calls = ObjectOutput.write, count(1)

    def failing(self: ObjectOutput, content: memoryview) -> None:
        if next(calls) > 5:
            raise StorageUnavailable("the line is cut")
        write(self, content)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectOutput, "write", failing)
        with pytest.raises(
            TrainingError, match=r"pseudo-00000004 could not be written: the line is cut; those that were"
        ):
            train(config(0, execution=2))
    gc.collect()
    assert not [key for key in remote.found() if "pseudo-00000004" in key]
    assert train(config(0, execution=3)).outcome == "Succeeded"


def test_a_request_whose_answer_was_lost_may_be_made_twice(bucket: Bucket) -> None:
    manifest = ObjectStorage(ObjectPath(f"{bucket.url}/a/manifest.json"))
    manifest.complete("mine")
    manifest.complete("mine")
    with pytest.raises(FileExistsError):
        manifest.complete("another's")
    with pytest.raises(FileExistsError):
        manifest.create("another's")
    assert manifest.read() == b"mine"


def test_folders_are_what_comes_before_the_next_slash(bucket: Bucket) -> None:
    for name in ("top", "a/weights", "a/manifest.json", "b/c/d"):
        ObjectStorage(ObjectPath(f"{bucket.url}/{name}")).replace("text")
    assert [str(folder) for folder in ObjectStorage(ObjectPath(bucket.url)).folders()] == [
        f"{bucket.url}/a",
        f"{bucket.url}/b",
    ]


def test_objects_written_by_others_are_seen_at_once(bucket: Bucket) -> None:
    folder = ObjectPath(bucket.url)
    assert ObjectStorage(folder).folders() == []
    bucket.write("one/x", b"1")
    assert ObjectStorage(folder).folders() == [folder / "one"]
    assert ObjectStorage(folder / "one" / "x").size() == 1
    bucket.write("one/x", b"12")
    bucket.write("two/x", b"1")
    bucket.write("two/deeper/x", b"1")
    assert ObjectStorage(folder).folders() == [folder / "one", folder / "two"]
    assert ObjectStorage(folder / "one" / "x").size() == 2
    bucket.remove("one/x")
    assert ObjectStorage(folder).folders() == [folder / "two"]


def test_ranges_are_read_in_blocks(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "_BLOCK_BYTES", 7)
    monkeypatch.setattr(object_storage, "_BLOCKS_AT_ONCE", 3)
    content = np.arange(100, dtype=np.uint8)
    bucket.write("x", content.tobytes())
    path = ObjectPath(f"{bucket.url}/x")
    for begin, count_ in ((0, 100), (3, 64), (50, 21), (99, 1), (20, 0)):
        out = np.zeros(count_, np.uint8)
        ObjectContent(path).read_into(begin, out)
        assert np.array_equal(out, content[begin : begin + count_])
    with pytest.raises(ValueError, match="ends before byte 105"):
        ObjectContent(path).read_into(99, np.zeros(6, np.uint8))


@pytest.fixture
def saved(remote: Bucket, config: Any, train: Any) -> Bucket:
    """Checkpoints after steps 2, 4 and 6, the last step of the phase."""
    train(config(0))
    return remote


def _invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments))


def _checkpoint(bucket: Bucket, name: str = "pseudo-00000006") -> str:
    return f"{bucket.url}/{FOLDER}/checkpoints/{name}"


def test_the_commands_take_urls(local: CheckpointStore, saved: Bucket) -> None:
    found = json.loads(_invoke("inspect", _checkpoint(saved), "--json").stdout)
    assert (found["step"], found["files"], found["verified"]) == (6, 2, True)
    assert _invoke("verify", _checkpoint(saved) + "/").exit_code == 0
    ended = _invoke("delink", _checkpoint(saved), "--to", "real")
    assert ended.stdout.strip() == _checkpoint(saved, "real-00000006"), ended.output
    there = next(manifest for manifest in local.committed("real") if manifest.delinked)
    assert_same(local.reader(there), newest(store_of(saved), "real"))
    ended = _invoke("delink", _checkpoint(saved), "--to", "real")
    assert (ended.exit_code, "exists, and is not replaced" in ended.stderr) == (78, True)
    assert _invoke("delink", _checkpoint(saved), "--to", "plain", "--materialize").exit_code == 0
    plain = next(manifest for manifest in store_of(saved).committed() if manifest.phase == "plain")
    assert plain.link is None
    for kind in KINDS:
        for name, array in local.reader(there).whole(kind).items():
            assert store_of(saved).reader(plain).tensor(name, kind).tobytes() == array.tobytes()


def test_export_and_sample_take_urls(local: CheckpointStore, saved: Bucket, tmp_path: Path) -> None:
    ended = _invoke("export", _checkpoint(saved), "--format", "safetensors", "--output", str(tmp_path / "out"))
    assert ended.exit_code == 0, ended.output
    theirs = str(local.folder / "pseudo-00000006")
    assert _invoke("export", theirs, "--format", "safetensors", "--output", str(tmp_path / "theirs")).exit_code == 0
    file = "model.safetensors"
    assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()
    assert _invoke("sample", _checkpoint(saved), "--tokens", "3").exit_code == 0


def test_verify_names_the_object_and_the_last_good_checkpoint(saved: Bucket) -> None:
    _damage(saved, "flipped", f"{FOLDER}/checkpoints/pseudo-00000006/{FILES[1]}")
    ended = _invoke("verify", _checkpoint(saved))
    assert ended.exit_code == 1
    assert f"{_checkpoint(saved)}/{FILES[1]} has the SHA-256" in ended.stderr
    assert "the last good checkpoint of this phase is pseudo-00000004" in ended.stderr
    for command in (("delink", "--to", "real"), ("export", "--format", "dcp", "--output", "nowhere"), ("sample",)):
        ended = _invoke(command[0], _checkpoint(saved), *command[1:])
        assert (ended.exit_code, "has the SHA-256" in ended.stderr) == (1, True), ended.output


def test_prune_takes_a_url(saved: Bucket) -> None:
    arguments = ("prune", f"{saved.url}/{FOLDER}", "--keep-last", "1")
    assert _invoke(*arguments, "--dry-run").stdout == "would remove pseudo-00000002\n"
    assert _names(saved) == ["pseudo-00000002", "pseudo-00000004", "pseudo-00000006"]
    assert _invoke(*arguments).stdout == "removed pseudo-00000002\n"
    assert not [key for key in saved.found() if "pseudo-00000002" in key]
    assert _names(saved) == ["pseudo-00000004", "pseudo-00000006"]


def _unreachable(_: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    # Nobody listens there.
    use("http://127.0.0.1:1", monkeypatch)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    return "EndpointConnectionError: Could not connect"


def _without_bucket(bucket: Bucket, _: pytest.MonkeyPatch) -> str:
    for key in bucket.found():
        bucket.remove(key)
    bucket.client.delete_bucket(Bucket=bucket.name)
    return "The specified bucket does not exist"


def _without_credentials(_: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    forget_clients()
    return "NoCredentialsError: Unable to locate credentials"


@pytest.mark.parametrize("spoil", [_unreachable, _without_bucket, _without_credentials])
def test_unreachable_storage_is_reported_and_not_taken_for_corrupt_or_empty(
    spoil: Callable[[Bucket, pytest.MonkeyPatch], str],
    saved: Bucket,
    config: Any,
    train: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest, why = store_of(saved).committed()[-1], spoil(saved, monkeypatch)
    says = re.escape("object storage does not give access to s3://") + f".*{why}.*AWS_ENDPOINT_URL and the credentials"
    for ask in (
        lambda: store_of(saved).newest("pseudo"),
        lambda: store_of(saved).verify(manifest),
        lambda: Fence(store_of(saved).work_directory, 3).claim(),
        lambda: train(config(0, execution=3)),
    ):
        with pytest.raises(StorageUnavailable, match=says):
            ask()
    for command in (("verify", _checkpoint(saved)), ("prune", f"{saved.url}/{FOLDER}", "--keep-last", "1")):
        ended = _invoke(*command)
        assert ended.exit_code in (2, 78)
        assert re.search(says, " ".join(ended.stderr.split())), ended.output
        assert "Traceback" not in ended.output
        assert isinstance(ended.exception, SystemExit)


def test_a_pod_says_what_is_missing(remote: Bucket, delink_of: Any, tmp_path: Path) -> None:
    remote.client.delete_bucket(Bucket=remote.name)
    pod = start_pod(delink_of(1), tmp_path / "pod")
    assert pod.wait() == 1
    message = pod.message()
    assert message["outcome"] == "Failed"
    assert "The specified bucket does not exist; check the bucket, and AWS_ENDPOINT_URL" in message["message"]


def test_object_storage_without_its_packages_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    # fsspec may have found it already.
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "s3", raising=False)
    with pytest.raises(StorageUnavailable, match=r"needs packages that are not installed; run pip install '\.\[s3\]'"):
        ObjectStorage(ObjectPath("s3://bucket")).exists()
