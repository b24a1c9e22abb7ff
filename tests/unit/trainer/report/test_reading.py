"""The folder of a job is read within bounds."""

import os
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.report.reading import Bounds, open_file, read_job_files
from pseudoreal_trainer.training import metrics_file

from tests.unit.trainer.checkpoint.support.by_hand import committed
from tests.unit.trainer.report.support.jobs import entry, line, started, write_folder


def test_lines_beyond_the_bytes_that_are_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    monkeypatch.setattr(metrics_file, "_BLOCK_BYTES", 1000)
    write_folder(tmp_path / "job", [line(step) for step in range(1, 1001)], [started(config(0), 0)])
    found = read_job_files(tmp_path / "job", Bounds(metrics_bytes=20_000))
    assert 20 < len(found.steps) < 200
    assert found.steps.step.tolist() == list(range(1, len(found.steps) + 1)), "a line cut by a block is whole"
    assert found.notices == ["Only the first 19.53 KiB of the metrics are read."]
    late = read_job_files(tmp_path / "job", Bounds(metrics_seconds=-1))
    assert "later steps are left out" in late.notices[0]
    assert len(read_job_files(tmp_path / "job").steps) == 1000


def test_a_line_without_end_is_not_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    monkeypatch.setattr(metrics_file, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr("pseudoreal_trainer.report.reading.MOST_LINE_BYTES", 5000)
    write_folder(tmp_path / "job", [line(1), b"x" * 100_000, line(2)], [started(config(0), 0)])
    found = read_job_files(tmp_path / "job")
    assert found.steps.step.tolist() == [1]
    assert "a line that no trainer writes" in found.notices[0]


def test_only_the_newest_entries_of_a_history_are_read(tmp_path: Path, config: Any) -> None:
    history = [started(config(0), 0), *(entry("Ended", n, outcome="Failed", message="m") for n in range(1, 50))]
    write_folder(tmp_path / "job", [line(1)], history)
    (tmp_path / "job" / "history" / "99999999999999999999.json").write_text("[" * 100_000)
    found = read_job_files(tmp_path / "job", Bounds(entries=10))
    assert [each.event for each in found.history] == ["Ended"] * 9
    assert found.notices == [
        "Of 51 entries of the history, the newest 10 are shown.",
        "1 entries of the history make no sense, and are left out.",
    ]


def test_links_in_the_folder_that_the_user_names_are_followed(tmp_path: Path, config: Any) -> None:
    write_folder(tmp_path / "disk", [line(1), line(2)], [started(config(0), 0)])
    committed(CheckpointStore(tmp_path / "disk", "u1"), 1)
    (tmp_path / "job").mkdir()
    for name in ("metrics.jsonl", "history", "checkpoints"):
        (tmp_path / "job" / name).symlink_to(tmp_path / "disk" / name)
    found = read_job_files(tmp_path / "job")
    assert (len(found.steps), len(found.history), len(found.checkpoints)) == (2, 1, 1)


def test_too_many_checkpoints_are_named_and_not_read(tmp_path: Path, config: Any) -> None:
    write_folder(tmp_path / "job", [line(1)], [started(config(0), 0)])
    for step in range(5):
        (tmp_path / "job" / "checkpoints" / f"pseudo-{step:08d}").mkdir(parents=True)
    assert read_job_files(tmp_path / "job", Bounds(checkpoints=4)).notices == [
        "5 checkpoints are more than 4, and are not shown."
    ]


@pytest.mark.parametrize("place", ["", "gone", "empty"])
def test_a_folder_without_a_job_is_an_error_with_a_remedy(place: str, tmp_path: Path) -> None:
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(TrainingError, match="holds neither metrics nor checkpoints of a job; give its work directory"):
        read_job_files(tmp_path / place)


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(TrainingError, match="cannot be read"):
        read_job_files(tmp_path)


def test_a_job_of_an_earlier_release_has_curves_and_a_notice(tmp_path: Path) -> None:
    write_folder(tmp_path / "job", [line(1), line(2)])
    found = read_job_files(tmp_path / "job")
    assert len(found.steps) == 2
    assert "has no history/" in found.notices[0]


def lowest_free_descriptor() -> int:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


@pytest.mark.parametrize("name", [".", "file", "pipe", "absent"])
def test_no_descriptor_stays_open_whatever_is_in_the_place_of_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"text")
    os.mkfifo(tmp_path / "pipe")
    before, found = lowest_free_descriptor(), None
    try:
        with open_file(tmp_path / name, follows_links=True) as file:
            found = None if file is None else file.read()
    except (IsADirectoryError, FileNotFoundError):
        assert name in (".", "absent")
    assert lowest_free_descriptor() == before
    assert found == (b"text" if name == "file" else None)
