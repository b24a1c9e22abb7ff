"""`pseudoreal report`; tests/unit/trainer/report has the tests of what is on the page."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.cli.report_command import MOST_JOBS

from tests.unit.trainer.report.support.jobs import line, started, write_folder
from tests.unit.trainer.storage.support.object_server import FOLDER, Bucket


def _report(folder: Path, *arguments: str) -> Any:
    return CliRunner().invoke(main, ["report", *arguments, "-o", str(folder / "page.html")])


def test_jobs_stand_beside_each_other(tmp_path: Path, config: Any) -> None:
    wide = config(0).model_copy(update={"batch": config(0).batch.model_copy(update={"sequences": 12})})
    for name, each in (("a", config(0)), ("b", wide)):
        write_folder(tmp_path / name, [line(1), line(2)], [started(each, 0)])
    shown = _report(tmp_path, str(tmp_path / "a"), str(tmp_path / "b"))
    assert shown.exit_code == 0, shown.output
    assert "phases[pseudo].batch.sequences" in (tmp_path / "page.html").read_text()


def test_what_is_left_out_is_said_on_stderr(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", [line(1), b"no line"])
    shown = _report(tmp_path, str(tmp_path / "a"))
    assert shown.exit_code == 0
    assert f"{tmp_path / 'a'}: 1 lines of the metrics make no sense" in shown.stderr


@pytest.mark.parametrize(
    ("folders", "exit_code", "sentence"),
    [
        (["gone"], 78, "gone holds neither metrics nor checkpoints of a job; give its work directory"),
        (["a"] * 2, 2, "a is given twice; give each folder once"),
        ([f"f{n}" for n in range(MOST_JOBS + 1)], 2, f"9 folders are too many for one page; give at most {MOST_JOBS}"),
        ([], 2, "Missing argument 'FOLDER...'"),
    ],
)
def test_a_wrong_command_line_writes_nothing(folders: list[str], exit_code: int, sentence: str, tmp_path: Path) -> None:
    shown = _report(tmp_path, *folders)
    assert (shown.exit_code, sentence in shown.stderr) == (exit_code, True), shown.output
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path, config: Any) -> None:
    write_folder(tmp_path / "a", [line(1)], [started(config(0), 0)])
    shown = CliRunner().invoke(main, ["report", str(tmp_path / "a"), "-o", str(tmp_path / "gone" / "page.html")])
    assert shown.exit_code == 1
    assert "gone/page.html cannot be read or written: No such file or directory" in shown.stderr


def test_a_job_in_object_storage_is_read(bucket: Bucket, config: Any, train: Any, tmp_path: Path) -> None:
    url = f"{bucket.url}/{FOLDER}"
    train(config(0).model_copy(update={"object_storage": url}))
    shown = _report(tmp_path, url)
    assert shown.exit_code == 0, shown.output
    page = (tmp_path / "page.html").read_text()
    assert "pseudo-00000006" in page
    assert "has no history/" not in page
    assert "at step 6" in page
