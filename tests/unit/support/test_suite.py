"""The whole suite as several pytest runs: every test runs exactly once, with one summary and one exit code
at the end."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from pseudoreal_dev.machine import paths

from tests.support import suite
from tests.support.suite import AT_ONCE, NOTHING_RAN, PARTS, SOLO, Part

GOOD = '<testsuites><testsuite><testcase classname="tests.unit.test_x" name="test" time="1" /></testsuite></testsuites>'
BAD = GOOD.replace(" />", "><failure /></testcase>").replace("test_x", "test_y")
INTERRUPTED = 2
CLUSTER, *_, UNITS = PARTS


def test_each_file_is_in_one_part() -> None:
    folders = (paths.REPOSITORY / "tests" / name for name in ("unit", "integration", "e2e"))
    files = [file.relative_to(paths.REPOSITORY) for folder in folders for file in folder.rglob("test_*.py")]
    assert len(files) > 100
    assert [file for file in files if sum(part.has(file) for part in PARTS) != 1] == []
    for part in PARTS:
        assert all((paths.REPOSITORY / folder).is_dir() for folder in (*part.folders, *part.ignored))


def test_what_is_marked_solo_is_in_a_part() -> None:
    files = [file for file in (paths.REPOSITORY / "tests").rglob("test_*.py") if "mark.solo" in file.read_text()]
    assert len(files) > 2
    assert all(SOLO.has(file.relative_to(paths.REPOSITORY)) for file in files if file != Path(__file__))


@pytest.mark.parametrize(
    ("flags", "usual", "deep"),
    [
        ("fpu sse4_1", 0, 0),
        ("fpu avx2", 1, 6),
        ("avx2 avx512f", 2, 12),
        ("avx2 avx512f avx512_bf16", 2, 15),
    ],
)
def test_processor_parts_imitate_only_what_the_machine_has(flags: str, usual: int, deep: int) -> None:
    found, all_of_them = suite.processor_parts(flags, False), suite.processor_parts(flags, True)
    assert (len(found), len(all_of_them)) == (usual, deep)
    assert len({part.name for part in all_of_them}) == deep
    assert {part.name for part in found} <= {part.name for part in all_of_them}
    asked = {value for part in all_of_them for value in part.environment.values()}
    assert "avx512f" in flags or not any("512" in value for value in asked)
    assert "avx512_bf16" in flags or "AVX512_CORE_BF16" not in asked


def test_processor_parts_set_what_torch_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "FOLDER", tmp_path)
    (tmp_path / "test_level.py").write_text(
        "import os, pytest\n@pytest.mark.processor\ndef test_level():\n"
        "    assert (os.environ['ATEN_CPU_CAPABILITY'], os.environ['ONEDNN_MAX_CPU_ISA']) == ('default', 'SSE41')\n"
    )
    (part,) = suite.processor_parts("avx2", False)
    assert replace(part, folders=(str(tmp_path),)).run("", ()) == 0


def test_so_many_run_at_once_and_the_first_begin_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part waits until AT_ONCE parts run together."""
    together, lock, begun = threading.Barrier(AT_ONCE), threading.Lock(), list[Part]()
    now, most = 0, 0

    def run(part: Part, *_: object) -> int:
        nonlocal now, most
        with lock:
            begun.append(part)
            now += 1
            most = max(most, now)
        together.wait(60)
        with lock:
            now -= 1
        return len(part.name)

    monkeypatch.setattr(Part, "run", run)
    parts = [Part("x" * number, ()) for number in range(2 * AT_ONCE)]
    assert {*suite._side_by_side("", (), parts)} == {(part, len(part.name)) for part in parts}
    assert {*begun[:AT_ONCE]} == {*parts[:AT_ONCE]}
    assert most == AT_ONCE


def test_nothing_begins_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, before = list[Part](), threading.Event(), {*threading.enumerate()}

    def run(part: Part, *_: object) -> int:
        begun.append(part)
        go_on.wait(60)
        return INTERRUPTED

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Part, "run", run)
    monkeypatch.setattr(suite, "wait", interrupted)
    parts = [Part(str(number), ()) for number in range(2 * AT_ONCE)]
    with pytest.raises(KeyboardInterrupt):
        next(suite._side_by_side("", (), parts))
    go_on.set()
    for thread in {*threading.enumerate()} - before:
        thread.join(60)
    assert {*begun} <= {*parts[:AT_ONCE]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(suite, "FOLDER", tmp_path)
    (tmp_path / "units.xml").write_text(GOOD)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_part_without_tests_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite._say([(UNITS, 0), (CLUSTER, NOTHING_RAN), (SOLO, NOTHING_RAN)], 61.0) == 0
    assert capsys.readouterr().out.splitlines()[-1].strip("=") == " 1 passed in 61.00s (0:01:01) "


def test_what_failed_is_named_and_fails_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "cluster.xml").write_text(BAD)
    (folder / "processor-default-sse41.xml").write_text(BAD)
    (older,) = suite.processor_parts("avx2", False)
    assert suite._say([(UNITS, 0), (CLUSTER, 1), (older, 1), (SOLO, 0)], 1.0) == 1
    *_, failed, again, summary = capsys.readouterr().out.splitlines()
    assert failed == "FAILED tests/unit/test_y.py::test"
    assert again == f"{failed} (ATEN_CPU_CAPABILITY=default) (ONEDNN_MAX_CPU_ISA=SSE41)"
    assert "2 failed, 1 passed" in summary


@pytest.mark.usefixtures("folder")
def test_a_run_of_pytest_that_was_interrupted_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite._say([(UNITS, 0), (CLUSTER, INTERRUPTED), (SOLO, 0)], 1.0) == 1
    assert "ended with exit code 2" in capsys.readouterr().out


def test_no_test_at_all_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "FOLDER", tmp_path)
    assert suite._say([(UNITS, NOTHING_RAN), (CLUSTER, NOTHING_RAN), (SOLO, NOTHING_RAN)], 1.0) == 1
