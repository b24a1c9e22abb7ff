"""A folder that is read again and again: only what was appended, and from the start where the file was cut."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.report.reading import Bounds, History, read_job_files
from pseudoreal_trainer.report.steps import Steps
from pseudoreal_trainer.training.metrics_file import truncate_after
from pseudoreal_trainer.ui.following import FollowedFolder

from tests.unit.trainer.report.support.jobs import entry, line, started, write_folder


def appended(folder: Path, *lines: bytes) -> None:
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"".join(each + b"\n" for each in lines))


def newest(followed: FollowedFolder) -> Steps:
    files = followed.read()
    assert files is not None, "something has changed"
    return files.steps


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read from a place in a file."""
    taken: list[int] = []
    real = os.pread

    def pread(descriptor: int, count: int, offset: int) -> bytes:
        found = real(descriptor, count, offset)
        taken.append(len(found))
        return found

    monkeypatch.setattr(os, "pread", pread)
    return taken


def test_only_appended_lines_are_read_and_only_then_is_there_news(tmp_path: Path, reads: list[int]) -> None:
    write_folder(tmp_path, [line(step) for step in range(1, 5001)])
    followed = FollowedFolder(tmp_path)
    assert len(newest(followed)) == 5000
    reads.clear()
    assert followed.read() is None
    appended(tmp_path, line(5001))
    assert newest(followed).step[-1] == 5001
    # Two comparisons of the last bytes, and the line.
    assert sum(reads) <= 2 * 512 + len(line(5001)) + 1


def test_a_line_counts_once_it_is_whole(tmp_path: Path) -> None:
    write_folder(tmp_path, [line(1)])
    followed = FollowedFolder(tmp_path)
    newest(followed)
    whole = line(2) + b"\n"
    for end in (1, 40, len(whole) - 1):
        with (tmp_path / "metrics.jsonl").open("r+b") as file:
            file.seek(len(line(1)) + 1)
            file.write(whole[:end])
        assert followed.read() is None, end
    appended(tmp_path)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\n")
    assert [*newest(followed).step] == [1, 2]


@pytest.mark.parametrize("again", [1, 3, 30], ids=["shorter", "as long", "longer"])
def test_steps_of_a_restart_replace_those_that_were_cut(tmp_path: Path, again: int) -> None:
    write_folder(tmp_path, [line(step) for step in range(1, 11)])
    followed = FollowedFolder(tmp_path)
    newest(followed)
    truncate_after(tmp_path / "metrics.jsonl", 7)
    appended(tmp_path, *(line(7 + step, seconds=float(step), loss=9.0) for step in range(1, again + 1)))
    steps = newest(followed)
    assert [*steps.step] == [*range(1, 8 + again)]
    assert {*steps.column("loss")[7:]} == {9.0}
    assert [*steps.process_starts] == [0, 7]


@given(growth=st.lists(st.integers(1, 30), min_size=1, max_size=5), refresh=st.integers(400, 3000))
def test_however_the_file_grows_the_steps_are_those_of_one_read(
    growth: list[int], refresh: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("job")
    write_folder(folder, [])
    followed, step = FollowedFolder(folder, refresh_bytes=refresh), 0
    for count in growth:
        appended(folder, *(line(step + number) for number in range(1, count + 1)))
        step += count
        found = followed.read()
    while followed.is_behind:
        found = followed.read()
    assert found is not None
    assert [*found.steps.step] == [*read_job_files(folder).steps.step]


def test_a_long_file_is_read_piece_by_piece_and_the_page_says_so(tmp_path: Path) -> None:
    write_folder(tmp_path, [line(step) for step in range(1, 101)])
    followed = FollowedFolder(tmp_path, refresh_bytes=10 * len(line(99)))
    files = followed.read()
    assert files is not None
    assert 0 < len(files.steps) <= 10
    assert followed.is_behind
    assert any("still being read" in notice for notice in files.notices)
    reads = 1
    while followed.is_behind:
        files, reads = followed.read(), reads + 1
    assert reads >= 10
    assert files is not None
    assert len(files.steps) == 100
    assert not any("still being read" in notice for notice in files.notices)


def test_no_more_than_the_bound_is_ever_read(tmp_path: Path, reads: list[int]) -> None:
    write_folder(tmp_path, [line(step) for step in range(1, 101)])
    followed = FollowedFolder(tmp_path, Bounds(metrics_bytes=5000))
    files = followed.read()
    assert files is not None
    assert any("Only the first" in notice for notice in files.notices) or len(files.steps) < 100
    appended(tmp_path, *(line(step) for step in range(101, 1001)))
    for _ in range(3):
        followed.read()
    assert sum(reads) < 5000 + 10 * 512 + 5000


def test_what_is_no_file_is_no_reason_to_wait(tmp_path: Path, config: Callable[..., Any]) -> None:
    """A pipe that nobody writes to: to open it would wait for ever."""
    write_folder(tmp_path, [], [started(config(0), 0)])
    (tmp_path / "metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "metrics.jsonl")
    os.mkfifo(tmp_path / "history" / "00000000000000000001.json")
    files = FollowedFolder(tmp_path).read()
    assert files is not None
    assert len(files.steps) == 0
    assert [each.event for each in files.history] == ["Started"]


def test_a_new_entry_of_the_history_is_news_and_old_ones_are_read_once(
    tmp_path: Path, config: Callable[..., Any]
) -> None:
    history = [started(config(0), 0), entry("Ended", 50, outcome="Failed", message="rank 1 died")]
    write_folder(tmp_path, [line(1)], history[:1])
    followed = FollowedFolder(tmp_path)
    first = followed.read()
    assert followed.read() is None
    (tmp_path / "history" / f"{1:020d}.json").write_text(history[1].to_json())
    second = followed.read()
    assert first is not None
    assert second is not None
    assert [each.message for each in second.history] == ["", "rank 1 died"]
    assert second.history[0] is first.history[0]


def test_lines_that_a_failed_read_took_are_news_in_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, [line(1)])
    followed = FollowedFolder(tmp_path)
    newest(followed)
    appended(tmp_path, line(2))

    def fails(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(History, "read", fails)
        for _ in range(2):
            with pytest.raises(TrainingError, match="cannot be read"):
                followed.read()
    assert [*newest(followed).step] == [1, 2]
    assert followed.read() is None


def test_metrics_that_are_removed_start_over(tmp_path: Path) -> None:
    write_folder(tmp_path, [line(1), line(2)])
    followed = FollowedFolder(tmp_path)
    newest(followed)
    (tmp_path / "metrics.jsonl").unlink()
    assert len(newest(followed)) == 0
    appended(tmp_path, line(1))
    assert [*newest(followed).step] == [1]
