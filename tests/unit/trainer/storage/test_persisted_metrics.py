"""With object storage, the lines of metrics.jsonl outlive the pod."""

import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.storage.objects import ObjectStorage
from pseudoreal_trainer.storage.path import ObjectPath, storage_path
from pseudoreal_trainer.storage.services import StorageUnavailable
from pseudoreal_trainer.training.metrics_file import PersistedMetrics, metrics_of

from tests.support.checkpoints import metrics
from tests.unit.trainer.storage.support.object_server import FOLDER, Bucket


def kept(bucket: Bucket) -> list[tuple[int, float]]:
    """Return steps and losses."""
    lines = [json.loads(line) for line in metrics_of(storage_path(f"{bucket.url}/{FOLDER}"))]
    return [(line["step"], line["loss"]) for line in lines]


class Crash(Exception):
    pass


def test_metrics_of_each_step_are_stored_once_after_two_lost_pods(
    remote: Bucket, config: Any, train: Any, tmp_path: Path
) -> None:
    train(config(0, "undisturbed").model_copy(update={"object_storage": None}))
    calls = count(1)

    def crash() -> bool:
        # After the fifth step: the checkpoint of the fourth one is there.
        if next(calls) == 6:
            raise Crash
        return False

    with pytest.raises(Crash):
        train(config(0), crash)
    shutil.rmtree(tmp_path / "work")
    train(config(0, execution=2))
    shutil.rmtree(tmp_path / "work")
    expected = [(line["step"], line["loss"]) for line in metrics(config(0, "undisturbed"))]
    assert [step for step, _ in expected] == [1, 2, 3, 4, 5, 6]
    assert kept(remote) == expected


def test_parts_behind_the_checkpoint_that_is_resumed_are_removed(remote: Bucket, config: Any, train: Any) -> None:
    train(config(0))
    expected = kept(remote)
    for key in remote.found():
        if "pseudo-00000006" in key or "pseudo-00000004" in key:
            remote.remove(key)
    calls = count(1)
    train(config(0, execution=2), lambda: next(calls) >= 1)
    assert kept(remote) == expected[:3], "it saved after one more step"
    train(config(0, execution=3))
    assert kept(remote) == expected


def test_metrics_that_could_not_be_written_are_part_of_the_next_write(
    remote: Bucket, config: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, calls = ObjectStorage.replace, count(1)

    def failing(self: ObjectStorage, text: str) -> None:
        if self.path.name == "lines.jsonl" and next(calls) == 1:
            raise StorageUnavailable("the line is cut")
        replace(self, text)

    monkeypatch.setattr(ObjectStorage, "replace", failing)
    train(config(0))
    assert [step for step, _ in kept(remote)] == [1, 2, 3, 4, 5, 6]


def test_metrics_command_prints_the_stored_metrics(remote: Bucket, config: Any, train: Any) -> None:
    train(config(0))
    said = CliRunner().invoke(main, ["metrics", f"{remote.url}/{FOLDER}"])
    assert said.exit_code == 0
    assert [json.loads(line)["step"] for line in said.stdout.splitlines()] == [1, 2, 3, 4, 5, 6]
    local = CliRunner().invoke(main, ["metrics", config(0).work_directory])
    assert local.stdout == said.stdout
    nothing = CliRunner().invoke(main, ["metrics", f"{remote.url}/nothing"])
    assert (nothing.exit_code, "has no metrics" in nothing.stderr) == (78, True)


def test_other_objects_beside_the_metrics_are_neither_read_nor_removed(bucket: Bucket) -> None:
    names = ["metrics/notes/today.txt", "metrics/7/lines.jsonl", "metrics/-00000000007/lines.jsonl", "metrics/readme"]
    for name in names:
        bucket.write(name, b"somebody's")
    folder = storage_path(bucket.url)
    assert isinstance(folder, ObjectPath)
    for step in (1, 2):
        lines = PersistedMetrics(folder, 1)
        lines.add(f"line {step}")
        lines.persist(step)
    assert [*metrics_of(folder)] == ["line 1", "line 2"]
    PersistedMetrics(folder, 0)
    assert sorted(bucket.found()) == sorted(names)
