"""Durations of tests per folder, compared with their budgets."""

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["passed", "failed", "error", "skipped"]

BUDGETS: dict[str, float] = {
    "tests/unit": 10,
    "tests/unit/client": 10,
    "tests/unit/contract": 10,
    "tests/unit/dev": 5,
    "tests/unit/operator": 40,
    "tests/unit/trainer": 5,
    "tests/unit/trainer/checkpoint": 275,
    "tests/unit/trainer/cli": 85,
    "tests/unit/trainer/convert": 30,
    "tests/unit/trainer/data": 16,
    "tests/unit/trainer/data/prepare": 12,
    "tests/unit/trainer/data/tokenizer": 5,
    "tests/unit/trainer/engine": 290,
    "tests/unit/trainer/forecast": 80,
    "tests/unit/trainer/heartbeat": 30,
    "tests/unit/trainer/launch": 90,
    "tests/unit/trainer/measure": 10,
    "tests/unit/trainer/model": 7,
    "tests/unit/trainer/plan": 12,
    "tests/unit/trainer/pod": 60,
    "tests/unit/trainer/preflight": 35,
    "tests/unit/trainer/training": 180,
    "tests/integration": 30,
    "tests/integration/client": 40,
    "tests/integration/operator": 285,
    "tests/integration/operator/chaos": 265,
    "tests/e2e": 250,
    "tests/e2e/faults": 495,
}
"""Folder -> budget in seconds for its tests in sequence, on a quiet machine with two cores while two other parts of the
suite run; a little more than measured. Tests in a listed subfolder count only there. A change that makes one slower
must make another faster, or raise the budget here with a reason. No test fails for exceeding it: a test cannot tell a
slow test from a busy machine."""
MOST_SECONDS = 15 * 60.0
"""Budget in seconds for all tests, run side by side."""


@dataclass(frozen=True)
class Result:
    test: str
    """Test id on pytest's command line."""
    seconds: float
    outcome: Outcome


def read(file: Path) -> list[Result]:
    """Return the results of a pytest run from its XML report."""
    found: dict[str, Result] = {}
    for case in ElementTree.parse(file).iter("testcase"):
        one = Result(_name(case), float(case.get("time", "0")), _outcome(case))
        # A test that passed, and whose clean-up then failed, is there twice.
        found[one.test] = _worse(one, found.get(one.test))
    return [*found.values()]


def _worse(one: Result, other: Result | None) -> Result:
    return one if other is None or other.outcome == "passed" else other


def _name(case: ElementTree.Element) -> str:
    """Return the test id: tests.unit.test_it.TestClass and its test become tests/unit/test_it.py::TestClass::test."""
    parts = case.get("classname", "").split(".")
    file = next((index for index, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    return "::".join(["/".join(parts[: file + 1]) + ".py", *parts[file + 1 :], case.get("name", "")])


def _outcome(case: ElementTree.Element) -> Outcome:
    for tag in ("error", "failure", "skipped"):
        if case.find(tag) is not None:
            return "failed" if tag == "failure" else tag  # type: ignore[return-value]
    return "passed"


def table(results: list[Result], seconds: float, budgets: dict[str, float] = BUDGETS) -> Iterator[str]:
    """Yield lines of a table. A folder without a budget gets a line of its own, with budget 0."""
    taken, tests = Counter[str](), Counter[str]()
    for result in results:
        folder = _counted_in(result.test, budgets)
        taken[folder] += result.seconds  # type: ignore[assignment]
        tests[folder] += 1
    yield f"{'folder':<40} {'tests':>6} {'seconds':>8} {'budget':>7}"
    for folder in sorted(tests):
        yield _line(folder, str(tests[folder]), taken[folder], budgets.get(folder, 0.0))
    yield _line("all, side by side", str(len(results)), seconds, MOST_SECONDS)


def _counted_in(test: str, budgets: dict[str, float]) -> str:
    parents = [str(parent) for parent in Path(test.partition("::")[0]).parents]
    return next((parent for parent in parents if parent in budgets), parents[0])


def _line(name: str, tests: str, seconds: float, budget: float) -> str:
    over = f"  OVER by {seconds - budget:.0f} s" if seconds > budget else ""
    return f"{name:<40} {tests:>6} {seconds:>8.0f} {budget:>7.0f}{over}"


def in_words(results: list[Result], broken: int, seconds: float) -> str:
    """Return a summary line like pytest's last one. `broken` is the number of crashed pytest runs."""
    count = Counter(result.outcome for result in results)
    count["error"] += broken
    said = [f"{count[one]} {one}" for one in ("failed", "passed", "skipped", "error") if count[one]]
    minutes, rest = divmod(round(seconds), 60)
    words = f" {', '.join(said) or 'no tests ran'} in {seconds:.2f}s ({minutes // 60}:{minutes % 60:02}:{rest:02}) "
    return words.center(100, "=")
