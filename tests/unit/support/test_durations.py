"""Durations and results of several pytest runs, merged into one summary."""

from pathlib import Path

from tests.support.durations import Result, in_words, read, table

XML = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite>
<testcase classname="tests.unit.a.test_one" name="test_it[x.y]" time="1.5" />
<testcase classname="tests.unit.a.test_one.TestMore" name="test_it" time="0.5"><skipped message="no GPU" /></testcase>
<testcase classname="tests.unit.test_two" name="test_it" time="2"><failure message="no">assert</failure></testcase>
<testcase classname="tests.unit.test_two" name="test_late" time="1" />
<testcase classname="tests.unit.test_two" name="test_late" time="1"><error message="its clean-up">x</error></testcase>
</testsuite></testsuites>
"""


def test_results_are_read_by_the_names_that_pytest_takes(tmp_path: Path) -> None:
    (tmp_path / "x.xml").write_text(XML)
    assert read(tmp_path / "x.xml") == [
        Result("tests/unit/a/test_one.py::test_it[x.y]", 1.5, "passed"),
        Result("tests/unit/a/test_one.py::TestMore::test_it", 0.5, "skipped"),
        Result("tests/unit/test_two.py::test_it", 2.0, "failed"),
        Result("tests/unit/test_two.py::test_late", 1.0, "error"),
    ]


def test_a_folder_counts_what_no_folder_below_it_counts() -> None:
    names = {"a/b/c/test_x.py::test": 3.0, "a/b/test_x.py::test": 5.0, "a/z/test_x.py::test": 7.0, "other/t.py::t": 1.0}
    results = [Result(name, seconds, "passed") for name, seconds in names.items()]
    lines = [line.split() for line in table(results, 10.0, {"a": 8.0, "a/b": 4.0})]
    assert lines[1:4] == [
        ["a", "1", "7", "8"],
        ["a/b", "2", "8", "4", "OVER", "by", "4", "s"],
        ["other", "1", "1", "0", "OVER", "by", "1", "s"],
    ]


def test_the_summary_reads_like_pytest_s() -> None:
    results = [Result("a", 1.0, "passed"), Result("b", 1.0, "passed"), Result("c", 1.0, "failed")]
    assert in_words(results, 1, 125.0).strip("=") == " 1 failed, 2 passed, 1 error in 125.00s (0:02:05) "
    assert "no tests ran" in in_words([], 0, 1.0)
