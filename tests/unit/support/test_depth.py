"""Long tests run only on request, for every selection of marks."""

import subprocess
import sys

import pytest
from pseudoreal_dev.machine import paths

from tests.support.depth import Depth

LONG = "tests/e2e/faults/test_blame.py"


def _collected(*options: str) -> str:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", LONG, *options]
    return subprocess.run(command, cwd=paths.REPOSITORY, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize(
    ("options", "wanted"),
    [((), False), (("-m", "not e2e"), False), (("-m", "long"), False), (("--deep", "--seed=7"), True)],
)
def test_long_tests_are_collected_in_deep_runs_alone(options: tuple[str, ...], wanted: bool) -> None:
    assert ("test_the_pod_where_it_began_is_named" in _collected(*options)) == wanted


def test_a_deep_run_says_how_to_repeat_it() -> None:
    assert "to repeat what is drawn: --deep --seed=7" in _collected("--deep", "--seed=7", "-v")


def test_what_is_drawn_is_the_same_but_in_deep_runs() -> None:
    def drawn(depth: Depth) -> float:
        return depth.chance("this").random()

    assert drawn(Depth(False, 1)) == drawn(Depth(False, 2))
    assert drawn(Depth(True, 1)) == drawn(Depth(True, 1)) != drawn(Depth(True, 2))
