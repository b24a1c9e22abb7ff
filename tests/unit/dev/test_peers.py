"""A test whose package is missing skips with a sentence, except in `make test`; other errors stay errors."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import suite

ROOT = Path(__file__).parents[3]
HIDDEN = "import sys\nsys.modules['moto'] = None\n"
"""What makes an installed package a missing one."""
AT_IMPORT = HIDDEN + "import moto\ndef test_it(): pass\n"
IN_TEST = HIDDEN + "def test_it():\n    import moto\n"
IN_FIXTURE = HIDDEN + "import pytest\n@pytest.fixture\ndef it():\n    import moto\ndef test_it(it): pass\n"
AS_CAUSE = HIDDEN + (
    "def test_it():\n    try:\n        import moto\n    except ImportError as error:\n"
    "        raise ValueError('moto is needed') from error\n"
)
BY_MARK = HIDDEN + "import pytest\n@pytest.mark.needs('moto')\ndef test_it(): raise ValueError\n"
OWN = "import pseudoreal_gone\ndef test_it(): pass\n"
"""A module of the project's own, and a name that is no package of `PEERS`."""


def _run(folder: Path, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-rs", "test_it.py"]
    environment = {"PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, *options], cwd=folder, env=environment, text=True, capture_output=True)


@pytest.mark.parametrize("test", [AT_IMPORT, IN_TEST, IN_FIXTURE, AS_CAUSE, BY_MARK])
def test_a_missing_package_skips_with_the_remedy(test: str, tmp_path: Path) -> None:
    done = _run(tmp_path, test)
    assert "1 skipped" in done.stdout, done.stdout
    assert "moto is not in this environment; `make venv` installs it" in done.stdout


@pytest.mark.parametrize("test", [AT_IMPORT, IN_TEST, IN_FIXTURE, AS_CAUSE, BY_MARK])
def test_a_missing_package_fails_where_all_are_asked_for(test: str, tmp_path: Path) -> None:
    done = _run(tmp_path, test, "--all-packages")
    assert done.returncode != 0
    assert "skipped" not in done.stdout


def test_a_missing_module_of_the_project_fails(tmp_path: Path) -> None:
    done = _run(tmp_path, OWN)
    assert done.returncode != 0
    assert "No module named 'pseudoreal_gone'" in done.stdout


def test_the_suite_asks_for_all_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(suite, "FOLDER", tmp_path)
    assert suite.SOLO[0].run("", []) == 0
    assert "--all-packages" in ran[0]
