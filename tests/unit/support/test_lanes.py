"""The end of a run in lanes: one summary of all of them, and one exit code."""

from pathlib import Path

import pytest

from tests.support import lanes
from tests.support.lanes import CLUSTER, NOTHING_RAN, SOLO, UNITS

GOOD = '<testsuites><testsuite><testcase classname="tests.unit.test_x" name="test" time="1" /></testsuite></testsuites>'
BAD = GOOD.replace(" />", "><failure /></testcase>").replace("test_x", "test_y")
INTERRUPTED = 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lanes, "FOLDER", tmp_path)
    (tmp_path / "units.xml").write_text(GOOD)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_lane_without_tests_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert lanes._say([(UNITS, 0), (CLUSTER, NOTHING_RAN), (SOLO, NOTHING_RAN)], 61.0) == 0
    assert capsys.readouterr().out.splitlines()[-1].strip("=") == " 1 passed in 61.00s (0:01:01) "


def test_what_failed_is_named_and_fails_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "cluster.xml").write_text(BAD)
    assert lanes._say([(UNITS, 0), (CLUSTER, 1), (SOLO, 0)], 1.0) == 1
    *_, failed, summary = capsys.readouterr().out.splitlines()
    assert failed == "FAILED tests/unit/test_y.py::test"
    assert "1 failed, 1 passed" in summary


@pytest.mark.usefixtures("folder")
def test_a_run_of_pytest_that_was_interrupted_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert lanes._say([(UNITS, 0), (CLUSTER, INTERRUPTED), (SOLO, 0)], 1.0) == 1
    assert "ended with exit code 2" in capsys.readouterr().out


def test_no_test_at_all_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "FOLDER", tmp_path)
    assert lanes._say([(UNITS, NOTHING_RAN), (CLUSTER, NOTHING_RAN), (SOLO, NOTHING_RAN)], 1.0) == 1
