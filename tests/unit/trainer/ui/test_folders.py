"""Runs below a folder: which are found, and the states that their files mean."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.ui import folders as folders_module
from pseudoreal_trainer.ui.folders import LocalRuns
from pseudoreal_trainer.ui.following import FollowedFolder
from pseudoreal_trainer.ui.view import JobView, Row

from tests.unit.trainer.checkpoint.support.by_hand import committed
from tests.unit.trainer.report.support.jobs import entry, line, started, write_folder


def rows(folder: Path) -> dict[str, Row]:
    """Return place -> row."""
    listing = LocalRuns(folder).listing().read()
    assert listing is not None
    return {row.place: row for row in listing.rows}


def notices(folder: Path) -> str:
    listing = LocalRuns(folder).listing().read()
    assert listing is not None
    return " ".join(listing.notices)


def write_record(folder: Path, name: str = "laptop", phases: tuple[str, ...] = ("pseudo", "real")) -> None:
    body = {"metadata": {"name": name}, "spec": {"phases": [{"name": each} for each in phases]}}
    (folder / "job.json").write_text(json.dumps({"uid": "1", "execution": 1, "job": body}))


def now(event: Any) -> Any:
    return event.model_copy(update={"time": time.time()})


@pytest.mark.parametrize(
    ("ends", "state", "note"),
    [
        ([], "Training", ""),
        ([{"outcome": "Failed", "message": "rank 1 died"}], "Failed", "rank 1 died"),
        ([{"outcome": "Yielded", "message": "asked to stop"}], "Stopped", "asked to stop"),
        ([{"outcome": "Succeeded"}], "Between phases", ""),
        ([{"outcome": "Succeeded", "phase": "real"}], "Complete", ""),
        ([{"outcome": "Succeeded", "phase": "real", "stage": "delink"}], "Between phases", ""),
    ],
)
def test_the_newest_entry_of_the_history_decides_the_state(
    ends: list[dict[str, Any]], state: str, note: str, tmp_path: Path, config: Callable[..., PhaseConfig]
) -> None:
    history = [now(started(config(0), 0)), *(now(entry("Ended", 1, **each)) for each in ends)]
    write_folder(tmp_path / "run", [line(1), line(2)], history)
    write_record(tmp_path / "run")
    row = rows(tmp_path)["run"]
    assert (row.name, row.state, row.note) == ("laptop", state, note)
    assert (row.progress, row.loss) == ("2 of 100", "2.5")


def test_training_without_a_sign_is_silent(tmp_path: Path, config: Callable[..., PhaseConfig]) -> None:
    write_folder(tmp_path / "run", [line(1)], [started(config(0), 0)])
    assert rows(tmp_path)["run"].state == "Training", "the metrics are new, whatever a clock said"
    os.utime(tmp_path / "run" / "metrics.jsonl", (1, 1))
    row = rows(tmp_path)["run"]
    assert row.state == "Silent"
    assert "No step for more than 10 minutes" in row.note


def test_a_job_without_a_history_is_listed(tmp_path: Path) -> None:
    write_folder(tmp_path / "old", [line(1)])
    (tmp_path / "new" / "pods").mkdir(parents=True)
    write_record(tmp_path / "new")
    assert rows(tmp_path)["old"].state == "Unknown"
    assert rows(tmp_path)["new"].state == "Starting"


def test_the_folder_itself_may_be_the_job(tmp_path: Path) -> None:
    write_folder(tmp_path, [line(1)])
    assert [*rows(tmp_path)] == [str(tmp_path)]


def test_folders_are_searched_four_levels_deep_and_not_below_a_job(tmp_path: Path) -> None:
    for place in ("a", "b/c/d/e", "b/c/d/e/f/g", "a/inside", ".hidden/x", "1/2/3/4/5"):
        write_folder(tmp_path / place, [line(1)])
    assert {*rows(tmp_path)} == {"a", "b/c/d/e"}


def test_links_are_not_followed(tmp_path: Path) -> None:
    """With a link, whoever may write into the folder could make `pseudoreal ui` read every folder of its user."""
    write_folder(tmp_path / "elsewhere" / "secret", [line(1)])
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs")
    assert rows(tmp_path / "runs") == {}


@pytest.mark.parametrize(
    "place",
    [
        "metrics.jsonl",
        "history",
        f"history/{0:020d}.json",
        "job.json",
        "checkpoints",
        "checkpoints/pseudo-00000001",
        "checkpoints/pseudo-00000001/manifest.json",
    ],
)
def test_file_of_a_job_that_is_a_link_counts_as_none(
    place: str, tmp_path: Path, config: Callable[..., PhaseConfig]
) -> None:
    """Otherwise anyone with write access to the folder could have any file of the user read."""
    for folder, name, step in (("runs/run", "laptop", 1), ("elsewhere", "secret", 7)):
        write_folder(tmp_path / folder, [line(step)], [now(started(config(0), 0, pod=name))])
        write_record(tmp_path / folder, name)
        committed(CheckpointStore(tmp_path / folder, name), 1, uid=name)
    file = tmp_path / "runs" / "run" / place
    before = shown(tmp_path / "runs" / "run")
    if file.is_dir():
        shutil.rmtree(file)
    else:
        file.unlink()
    without = shown(tmp_path / "runs" / "run")
    assert without != before, "the file is shown"
    file.symlink_to(tmp_path / "elsewhere" / place)
    assert shown(tmp_path / "runs" / "run") == without


def shown(folder: Path) -> tuple[object, ...]:
    """Return a job's fields in the list and on its page."""
    (row,) = rows(folder.parent).values()
    files = FollowedFolder(folder).read()
    assert files is not None
    pods, jobs = [each.pod for each in files.history], [head.job.name + head.job.uid for head in files.checkpoints]
    return row.name, row.state, row.progress, [*files.steps.step], pods, jobs


def test_folder_with_nothing_but_links_is_no_job(tmp_path: Path, config: Callable[..., PhaseConfig]) -> None:
    write_folder(tmp_path / "elsewhere", [line(1)], [started(config(0), 0)])
    (tmp_path / "runs" / "run").mkdir(parents=True)
    for name in ("metrics.jsonl", "history"):
        (tmp_path / "runs" / "run" / name).symlink_to(tmp_path / "elsewhere" / name)
    assert rows(tmp_path / "runs") == {}


def test_searches_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        write_folder(tmp_path / f"{number:02}", [line(1)])
    monkeypatch.setattr(folders_module, "_MOST_JOBS", 5)
    assert len(rows(tmp_path)) == 5
    assert "Only 5 jobs in" in notices(tmp_path)
    monkeypatch.setattr(folders_module, "_MOST_FOLDERS", 4)
    assert len(rows(tmp_path)) == 3


def test_files_that_make_no_sense_stop_no_list(tmp_path: Path) -> None:
    write_folder(tmp_path / "good", [line(1)])
    bad = tmp_path / "bad"
    (bad / "history").mkdir(parents=True)
    (bad / "metrics.jsonl").write_bytes(b"\xff" * 200_000 + b"\n{}\n" + b"[" * 100_000)
    (bad / "history" / "1.json").write_text("{")
    (bad / "job.json").write_text('{"job": ["x", {"metadata": 7}]}')
    os.mkfifo(bad / "history" / "2.json")
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    os.mkfifo(pipes / "metrics.jsonl")
    os.mkfifo(pipes / "job.json")
    found = rows(tmp_path)
    assert {*found} == {"good", "bad", "pipes"}
    assert (found["bad"].name, found["bad"].state) == ("bad", "Unknown")


@pytest.mark.parametrize("seconds", [-5e9, -1, 5e9, 3e11, 9e18], ids=str)
def test_time_of_metrics_outside_of_all_trainings_is_no_sign(
    seconds: float, tmp_path: Path, config: Callable[..., PhaseConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems keep times after the year 9999, the last year of Python's dates."""
    for name in ("run", "other"):
        write_folder(tmp_path / name, [line(1)], [started(config(0), 0)])
    real = folders_module._state_of

    def state_of(path: Path) -> tuple[int, int, int] | None:
        return (1, 1, int(seconds * 1e9)) if path.name == "metrics.jsonl" and path.parent.name == "run" else real(path)

    monkeypatch.setattr(folders_module, "_state_of", state_of)
    found = rows(tmp_path)
    assert {*found} == {"run", "other"}
    assert (found["run"].since, found["run"].state) == ("2026-05-28 20:26:40", "Silent"), "the time of the history"


@pytest.mark.parametrize("error", [ValueError("x"), OverflowError("x"), OSError("x")], ids=repr)
def test_row_that_cannot_be_made_stops_no_list(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("good", "bad"):
        write_folder(tmp_path / name, [line(1)])
    real = folders_module._row_of

    def row_of(folder: Path, top: Path) -> Row:
        if folder.name == "bad":
            raise error
        return real(folder, top)

    monkeypatch.setattr(folders_module, "_row_of", row_of)
    found = rows(tmp_path)
    assert {place: row.state for place, row in found.items()} == {"good": "Unknown", "bad": "Unreadable"}
    assert found["bad"].note == "x"


def test_page_of_a_job_appears_after_a_first_read_that_failed(
    tmp_path: Path, config: Callable[..., PhaseConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "run", [line(1)], [now(started(config(0), 0))])
    source = LocalRuns(tmp_path)
    source.listing().read()
    feed = source.job(rows(tmp_path)["run"].id)
    assert feed is not None

    def fails(_: Path) -> None:
        raise PermissionError("denied")

    with monkeypatch.context() as failing:
        failing.setattr(folders_module, "_last_entry", fails)
        with pytest.raises(PermissionError, match="denied"):
            feed.read()
    view = feed.read()
    assert view is not None
    assert (view.state, [*view.job.steps.step]) == ("Training", [1])
    assert feed.read() is None


def test_a_folder_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    assert "gone cannot be read: No such file or directory" in notices(tmp_path / "gone")


def test_an_unchanged_list_is_no_news(tmp_path: Path, config: Callable[..., PhaseConfig]) -> None:
    write_folder(tmp_path / "run", [line(1)], [started(config(0), 0)])
    listing = LocalRuns(tmp_path).listing()
    assert listing.read() is not None
    assert listing.read() is None
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(line(2) + b"\n")
    again = listing.read()
    assert again is not None
    assert again.rows[0].progress == "2 of 100"


def view_of(folder: Path) -> JobView:
    source = LocalRuns(folder)
    source.listing().read()
    (row,) = rows(folder).values()
    feed = source.job(row.id)
    assert feed is not None
    view = feed.read()
    assert view is not None
    return view


def test_commands_are_quoted_and_say_when_they_would_do_harm(
    tmp_path: Path, config: Callable[..., PhaseConfig]
) -> None:
    folder = tmp_path / "a run; rm -r x"
    write_folder(folder, [line(1)], [now(started(config(0), 0))])
    commands = {command.text: command.refusal for command in view_of(tmp_path).commands}
    quoted = f"'{folder}'"
    assert f"pseudoreal report {quoted} -o report.html" in commands
    assert "It trains" in commands[f"pseudoreal run JOB.yaml --workdir {quoted} --resume"]
    assert "It trains" in commands[f"rm -r {quoted}"]


def test_only_jobs_of_the_list_have_pages(tmp_path: Path) -> None:
    write_folder(tmp_path / "runs" / "a", [line(1)])
    write_folder(tmp_path / "other", [line(1)])
    source = LocalRuns(tmp_path / "runs")
    source.listing().read()
    for id in ("../other", str(tmp_path / "other"), "a", ""):
        assert source.job(id) is None
